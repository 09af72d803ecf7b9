"""What the records in docs/results say: their rows and runs, and the facts that sentences of pages are about."""

import json
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any, NamedTuple

from scripts.evidence.numbers import NUMBER
from scripts.reports.frame import RESULTS
from scripts.reports.markdown import GIB, MIB, ratio_of, relative
from scripts.reports.papers import REPOSITORY

STD, BFLOAT16, GRAPHS = "norm=std", "trainer.precision=bfloat16", "trainer.capture=true"
LITE0, SHORT, TRAINED = "camvid/finetune/lite0", "camvid/finetune/short_400", "camvid/table3_trained"
WIDE = "182 classes, stride 8"
LARGER_IN_PLACE = "data.crop_size=352 norm=inplace norm.activation=leaky_relu"
LARGER_RECOMPUTED = "data.crop_size=376 trainer.recompute=activations"


@cache
def record(name: str) -> Any:
    """A file of docs/results, without its suffix."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def rows(name: str, call: str, *items: str, **keys: Any) -> list[dict[str, Any]]:
    """The rows of a benchmark's call with these values, in these items or in all."""
    (found,) = (each["items"] for each in record(name)["calls"] if each.get("name", "") == call)
    several = (row for item in items or found for row in found[item])
    return [row for row in several if all(row.get(key) == value for key, value in keys.items())]


def row(name: str, call: str, item: str, **keys: Any) -> dict[str, Any]:
    """The only row of an item with these values. ValueError: there is none, or there are several."""
    found = rows(name, call, item, **keys)
    if len(found) != 1:
        raise ValueError(f"{name}: call {call!r}, item {item!r}, {keys}: {len(found)} rows, expected one")
    return found[0]


def ms(row: dict[str, Any]) -> float:
    """The median time of a row."""
    return median(row["times_ms"])


def ratio(one: Sequence[dict], other: Sequence[dict], key: str = "times_ms") -> float:
    """The median ratio of times of the same rounds, as in tables."""
    return ratio_of(*([time for row in several for time in row[key]] for several in (one, other))).median


def runs(name: str, *path: str, file: str = "results") -> list[float]:
    """A value in the results of a run and of its repetitions with other seeds."""
    found = []
    for folder in sorted([RESULTS / name, *RESULTS.glob(f"{name}_seed*")]):
        value = record(str((folder / file).relative_to(RESULTS)))
        for key in path:
            value = value[key]
        found.append(value)
    return found


def scores(name: str, key: str = "miou", file: str = "results") -> list[float]:
    """The scores of a run and of its repetitions, in %."""
    return [100 * score for score in runs(name, key, file=file)]


def spread(name: str, file: str = "results") -> tuple[float, float]:
    """Mean and standard deviation of mIoU over seeds, in %."""
    found = scores(name, file=file)
    return mean(found), stdev(found)


def in_block(name: str, words: str) -> float:
    """The number {} where the words first stand in the blocks of a name, on all pages."""
    pages = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
    blocks = "".join(re.findall(f"(?s)<!-- {name} start -->(.*?)<!-- {name} end", "".join(map(Path.read_text, pages))))
    found = re.findall(NUMBER.join(map(re.escape, words.split("{}"))), blocks)
    if not found:
        raise ValueError(f"{words!r} is not in the block {name}")
    return float(found[0].replace(",", ""))


def on_h100(norms: str, *switches: str, call: str = "h100") -> dict[str, Any]:
    """Table 3's step with standard or in-place norms."""
    own = [STD, *switches] if norms == "standard" else switches
    return row("steps", call, f"start1/{norms}", switch=" ".join(own) or "default")


def on_h200(network: str, method: str, key: str = "times_ms") -> float:
    """Time in bfloat16, relative to the baseline's. captured_ms: with CUDA graphs."""
    one, plain = (rows("networks", "h200", f"{network}/bfloat16", method=each) for each in (method, "plain"))
    return ratio(one, plain, key) if key.endswith("_ms") else one[0][key] / plain[0][key]


def both_regimes(network: str) -> Iterator[float]:
    """Of checkpointing and of a plan in its memory, each without CUDA graphs and with them."""
    for method in ("checkpoint per block", "peak of the checkpoints"):
        yield from (on_h200(network, method, key) for key in ("times_ms", "captured_ms"))


def over_networks(method: str, key: str = "times_ms", call: str = "cpu") -> list[float]:
    """Of several networks on a CPU: times or bytes, relative to the baseline's."""
    found = []
    for own, plain in zip(rows("networks", call, method=method), baselines(call, method), strict=True):
        value = relative(own, plain, key)
        assert value is not None, own
        found.append(value.median)
    return found


def over_shapes(strategy: str, call: str) -> float:
    """What a strategy's BN + ACT + CONV takes more time than the standard one on a CPU, in % (median over shapes)."""
    both = (rows("layers", call, strategy=each) for each in (strategy, "standard"))
    return 100 * median(ratio([own], [plain]) for own, plain in zip(*both, strict=True)) - 100


def baselines(call: str, method: str) -> list[dict[str, Any]]:
    """The baselines of the networks that a method has."""
    names = {each["network"] for each in rows("networks", call, method=method)}
    return [each for each in rows("networks", call, method="plain") if each["network"] in names]


class Compared(NamedTuple):
    """Several networks in the memory of activation checkpointing: median times, relative to the baseline's."""

    networks: int
    checkpointed: float
    planned: float


def compared(call: str = "cpu") -> Compared:
    both = [over_networks(method, call=call) for method in ("checkpoint per block", "peak of the checkpoints")]
    return Compared(len(both[0]), *map(median, both))


def arm(name: str) -> tuple[float, ...]:
    """A row of CamVid's table of Table 3's protocol: steps, estimated MiB, minutes, mIoU ± its deviation."""
    folder, (planned,) = f"{TRAINED}/{name}", rows("memory_plan", "all", f"experiments/camvid_table3_trained/{name}")
    steps, minutes = mean(runs(folder, "config", "trainer", "steps")), mean(runs(folder, "training", "minutes"))
    return steps, planned["by_tiles"] / MIB, minutes, *spread(folder)


def of_memory(name: str) -> tuple[float, ...]:
    """A run's peak in MiB, and its mIoU ± its deviation."""
    return mean(runs(f"{TRAINED}/{name}", "training", "peak_memory_mib")), *spread(f"{TRAINED}/{name}")


def sized(network: str, height: int) -> list[float]:
    """mIoU of the ways to cover images whose sides are no multiples of the stride."""
    ways = ("repeated pixels", "zeros", "not padded, cut", "stretched")
    return [100 * row("camvid/sizes", "", network, height=height, way=way)["miou"] for way in ways]


def longer(network: str, *items: str) -> float:
    """Time of a step with larger crops, relative to standard crops."""
    one, other = (rows("camvid/table3_trained_steps", "", *items, switch=each) for each in (network, "default"))
    return ratio(one, other)


def restored(precision: str, key: str) -> list[float]:
    """Angles and drifts of gradients from restored activations."""
    return [each[key] for each in record("reversible/restored")["rows"] if each["precision"] == precision]


def of_quality(quality: int) -> float:
    """Top-1 on test images that were saved again as JPEG."""
    return next(100 * each["top1"] for each in record("cifar/jpeg_quality")["rows"] if each["quality"] == quality)


def single(*names: str, key: str = "miou") -> list[float]:
    """The scores of single runs, in %."""
    return [scores(name, key)[0] for name in names]


def tiles(loss: str) -> float:
    """Time of the tiled loss, relative to upsampling all logits."""
    one, other = (rows("steps/loss", "cpu", f"{WIDE}, {loss}", way=way) for way in ("tiles", "whole logits"))
    return ratio(one, other)


def most(call: str, item: str) -> float:
    """What fits into 12 GiB, measured."""
    (found,) = rows("memory_plan/fit", call, f"{item}/12GiB")
    return found.get("most crops") or found["most"]


def limit(network: str, key: str) -> float:
    """GiB of 256 images on four devices of 12 GB."""
    return row("memory_plan", "one_device", f"limits/{network}")[key] / GIB


def restoring() -> float:
    """Minutes of a training from restored activations, relative to stored ones."""
    one, other = (runs(f"cifar/stored/{name}", "training", "minutes")[0] for name in ("restored", "stored"))
    return one / other


def ablation(name: str) -> tuple[float, float]:
    """The score of a short training with one change, and its difference from the one without."""
    (score,), (other,) = single(f"camvid/finetune/{name}_400"), single(SHORT)
    return score, score - other


def at_equal_time() -> tuple[float, float, float]:
    """mIoU of standard crops that trained as long as larger ones ± its deviation, and how much more it is."""
    score, deviation = spread(f"{TRAINED}/std_equal_time")
    return score, deviation, score - mean(scores(f"{TRAINED}/recompute_larger_crops"))


def synchronised() -> list[float]:
    """What synchronised norms gain on average, and the scores with and without them, seed by seed."""
    both = [scores(f"camvid/table3/{name}") for name in ("inplace_sync_fixed_batch", "inplace_fixed_batch")]
    return [mean(both[0]) - mean(both[1]), *both[0], *both[1]]


def recomputed_norms() -> float:
    """Time of a step with standard norms and recomputed activations, relative to in-place norms."""
    names = ("norm=std trainer.recompute=activations", "default")
    one, other = (rows("steps", "cpu_recompute", switch=name) for name in names)
    return ratio(one, other)
