"""Write the numbers into README.md, docs/memory.md, docs/originals.md and docs/training.md:

    python -m scripts.evidence.documents

A table, or a few words in a line, stands between `<!-- NAME start -->` and `<!-- NAME end -->`. Numbers come from the
records in docs/results, or are counted now, on fake tensors. Other words in tables are written by hand and stay.
"""

import csv
import json
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from omegaconf import DictConfig

from engine.configuration.command_line import configured
from engine.output_files import write_file
from models import bodies
from models.bodies import resnext101
from scripts.evidence import strategy_table
from scripts.evidence.frame import GIB, MIB, RESULTS, ratio_of
from scripts.evidence.strategy_table import BODIES, RECOMPUTED_NORMS, STRATEGIES, recomputation_table
from scripts.evidence.training import code, median_ms, ratio
from scripts.evidence.training_steps import DEFAULT
from scripts.reports.papers import REPOSITORY

DOCUMENTS = tuple(
    REPOSITORY / name for name in ("README.md", "docs/memory.md", "docs/originals.md", "docs/training.md")
)
BLOCK = re.compile(r"(?s)(?<=<!-- )(\w+)( start -->\n?)(.*?)(?=\n?<!-- \1 end -->)")
BUDGETS = (  # the methods in each row of the table
    ["ResNet-110, std, compiled, budget 1"],
    ["ResNet-110, inplace", "ResNet-110, std, compiled, budget 0.5"],
    ["ResNet-110, inplace, blocks"],
    ["ResNet-110, inplace, sqrt"],
    ["RevNet-110, inplace, reversible"],
)


def written(text: str, only: Callable[[str], bool] = lambda name: True) -> str:
    """A document with new numbers in its blocks, or in those whose names `only` accepts. KeyError: an unknown name."""

    def block(found: re.Match) -> str:
        name, mark, before = found.groups()
        return f"{name}{mark}{BLOCKS[name](before) if only(name) else before}"

    return BLOCK.sub(block, text)


def record(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text())


def rows(table: str) -> list[list[str]]:
    """The cells of a table's rows."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def filled(table: str, column: int, numbers: Iterable[Sequence[str]]) -> str:
    """A table with `numbers` in the cells of its rows, from a column on."""
    lines = table.splitlines()[:2]
    for row, own in zip(rows(table), numbers, strict=True):
        row[column : column + len(own)] = own
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


@cache
def kept(body: str) -> dict[str, int]:
    """{norm: bytes per input pixel that a whole network keeps}"""
    return {norm: strategy_table.bytes_per_pixel(norm, body) for norm in STRATEGIES}


def _results(table: str) -> str:
    """What the usual way takes or reaches, and what the way of this project does: a row for each of eight claims."""
    plan = {
        (row["network"], row["crops"], row["combination"]): row["device"] for row in record("memory_plan")["one_device"]
    }
    numbers = [[f"{kept('ResNeXt-101')[norm]:,}" for norm in ("std", "inplace")]]
    for kind in ("float32", "trainer.recompute=sqrt, bfloat16"):
        devices = [plan["cityscapes_resnext101", 16, f"{norm} norms, {kind}"] for norm in ("standard", "in-place")]
        numbers.append([f"{device / GIB:.1f}" for device in devices])
    steps = _by_switch("training_cpu_norms")
    numbers.append(
        [f"{steps[norm]['peak_bytes'] / MIB:.0f}; {median_ms(steps[norm])}" for norm in ("norm=std", DEFAULT)]
    )
    case = "182 classes, stride 8, bootstrapped, 25 %"
    losses = {row["way"]: row for row in record("loss")["rows"] if row["case"] == case}
    ways = [losses["whole logits"], losses["tiles"]]
    numbers.append([f"{way['peak_bytes'] / MIB:.0f}; {statistics.median(way['times_ms']):.0f}" for way in ways])
    numbers.append([f"{_score(f'camvid/{norm}')['miou']:.2%}".strip("%") for norm in ("std", "inplace")])
    lines = csv.DictReader((RESULTS / "camvid_table3.csv").read_text().splitlines())
    seeds = {
        line["runs"]: (float(line["percent"]), float(line["deviation"] or 0))
        for line in lines
        if line["score"] == "mIoU"
    }
    numbers.append(["{:.1f} ± {:.1f}".format(*seeds[row]) for row in ("std", "inplace_fixed_batch")])
    numbers.append([f"{_score(f'revnet_table3/{name}')['top1']:.2%}".strip("%") for name in ("resnet32", "revnet38")])
    return filled(table, 1, numbers)


def _score(run: str) -> dict:
    return json.loads((RESULTS / run / "results.json").read_text())


def _by_switch(name: str) -> dict[str, dict]:
    return {row["switch"]: row for row in record(name)["rows"]}


def _switches(table: str) -> str:
    """Time and saved bytes of every switch relative to the default. ValueError: a measured switch has no row."""
    times: dict[str, list[str]] = {}
    saved: dict[str, str] = {}
    for file in sorted(RESULTS.glob("training_cpu*.json")):
        measured = _by_switch(file.stem)
        default = measured.pop(DEFAULT)
        for name, row in measured.items():
            times.setdefault(code(name), []).append(f"{ratio(row, default):.2f}")
            saved[code(name)] = f"{row['saved_bytes'] / default['saved_bytes']:.2f}".replace("1.00", "1")
    if missing := times.keys() - {row[0] for row in rows(table)}:
        raise ValueError(f"docs/training.md has no row for {', '.join(missing)}")
    numbers = {name: [" – ".join(sorted({min(own), max(own)})), saved[name]] for name, own in times.items()}
    return filled(table, 1, [numbers.get(row[0], row[1:3]) for row in rows(table)])


def _budgets(table: str) -> str:
    """Peak of a step and time to standard norms, of the methods of each row."""
    found = {row["method"]: row for row in record("reversible")["budget"]}
    standard = found["ResNet-110, std"]
    numbers = []
    for methods in BUDGETS:
        chosen = [found[method] for method in methods]
        times = [ratio_of(row["times_ms"], standard["times_ms"]).median for row in chosen]
        peaks = (f"{row['peak_bytes'] / MIB:.0f}" for row in chosen)
        numbers.append(["; ".join(peaks), "; ".join(f"{time:.2f}" for time in times)])
    return re.sub(r"\(\d+ MiB\)", f"({standard['peak_bytes'] / MIB:.0f} MiB)", filled(table, 2, numbers), count=1)


def _parameters(table: str) -> str:
    """Millions of parameters of the networks in the first cells, with the classes of CIFAR-10 (100), or of ImageNet."""
    numbers = []
    for name, *_ in rows(table):
        body = getattr(bodies, name.strip("`"))
        with torch.device("meta"):
            networks = [body(classes=classes) for classes in ((10, 100) if "cifar" in name else (1000,))]
        counts = [f"{sum(p.numel() for p in network.parameters()) / 1e6:.2f}" for network in networks]
        numbers.append([" ".join([counts[0], *(f"({count})" for count in counts[1:])])])
    return filled(table, 2, numbers)


def _loop(_: str) -> str:
    """The overhead of the training loop."""
    times = record("training_cpu")["overhead_ms"]
    overhead = ratio_of(times["real"], times["bare"])
    quartiles = f"quartiles {overhead.lower:.3f} – {overhead.upper:.3f}"
    return f"{overhead.median:.3f} ({quartiles}) of {statistics.median(times['bare']):.0f} ms"


def _or_inplace(_: str) -> str:
    """Standard norms whose activations are computed again, beside in-place norms."""
    steps = _by_switch("training_cpu_recompute")
    ours, default = steps["norm=std trainer.recompute=activations"], steps[DEFAULT]
    inplace, recomputed = (f"{row['saved_bytes'] / MIB:.1f} MiB" for row in (default, ours))
    return f"{inplace} against {recomputed}, in {ratio(ours, default):.2f} times the time"


BLOCKS: dict[str, Callable[[str], str]] = {
    "results": _results,
    "strategies": lambda _: strategy_table.table([strategy_table.measure(norm) for norm in STRATEGIES]),
    "bodies": lambda _: strategy_table.network_table({body: kept(body) for body in BODIES}),
    "recomputation": lambda _: recomputation_table(resnext101, RECOMPUTED_NORMS),
    "budgets": _budgets,
    "ranges": lambda _: strategy_table.range_table(),
    "switches": _switches,
    "parameters": _parameters,
    "loop": _loop,
    "or_inplace": _or_inplace,
}


@dataclass
class NoKeys:
    """The command takes no keys."""


@configured("documents", NoKeys)
def main(_: DictConfig) -> None:
    for document in DOCUMENTS:
        write_file(document, written(document.read_text()))


if __name__ == "__main__":
    main()
