"""Measure on a CUDA device what the documents claim about it, in 40 minutes:

    python -m scripts.gpu_evidence camvid=DIR out=DIR               # nine minutes; repeat it while it says so
    python -m scripts.gpu_evidence part=abn out=DIR                 # one part, also what has failed
    python -m scripts.gpu_evidence rehearse=true out=DIR            # on a CPU, to check that every line runs
    python -m scripts.gpu_evidence part=abn measure=false out=DIR   # tables and picture from the record, without a GPU
    python -m scripts.gpu_evidence measure=false keep=true out=DIR  # adds the records to those in docs/results

A part (check, steps, fit, abn, networks, train, loss, host, exact or ranks) is a benchmark of scripts/evidence with
certain arguments. DIR/gpu_PART.json is written after each item, and the same command adds what is missing. What has
failed is left out with the reason. docs/results/gpu.md says what was measured.
"""

import json
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from omegaconf import MISSING, DictConfig

from engine.configuration import config as configuration
from engine.configuration.command_line import configured
from engine.schema.keys import key
from scripts.evidence import check, equal_memory, fit, layers, loss, networks, ranks, training
from scripts.evidence.documents import RECORDS
from scripts.evidence.layers import HOST
from scripts.evidence.zoo import DECODER
from scripts.reports import frame

ALL = "all"


class Part(NamedTuple):
    """A benchmark, and its arguments in each call, on a card and in a rehearsal."""

    minutes: float  # of the 40 for all parts
    benchmark: frame.Benchmark
    calls: list[dict[str, Any]]
    rehearsed: dict[str, Any]


CUDA: dict[str, Any] = {"device": "cuda"}
LAYERS: dict[str, Any] = {"device": "cuda", "dtypes": ["float32", "bfloat16"], "sample_ms": 6.0, "rounds": 15}
LAYERS |= {"groups": ["bn_act_conv", "bn_act"], "captured": True}
ABN = [LAYERS | {"batch": 32}, LAYERS | {"batch": 128, "compiler": None}]  # the paper's minibatch first
TINY_LAYERS: dict[str, Any] = {
    **{"backend": "triton", "compiler": "aot_eager", "dtypes": ["float32"], "layouts": ["channels_last"]},
    **{"rounds": 1, "sample_ms": 0.01, "batch": 2, "channels": 2, "pixels": [2], "captured": True},
}
OF_HOST: dict[str, Any] = {"groups": [*HOST], "captured": False}
NETWORKS: dict[str, Any] = {
    **{"device": "cuda", "images": 128, "precisions": ["bfloat16", "float32"], "shares": [0.3], "rounds": 10},
    **{"captured": True, "compiler": None},
    "only": ["resnet50", "densenet121", "convnext_tiny", "efficientnet_v2_s", "vit_b_16", DECODER],
}
TINY_NETWORKS: dict[str, Any] = {
    **{"only": ["squeezenet1_1", DECODER], "precisions": ["bfloat16"], "images": 2, "image_size": 32},
    **{"shares": [0.5], "rounds": 1, "compiler": None, "captured": True},
}
EXACT: dict[str, Any] = {
    **{"exact": True, "precisions": ["float64", "float32", "bfloat16"], "compiler": None, "rounds": 1},
    "captured": False,
}
STEPS = CUDA | {"crop_size": 512, "parts": ["card"], "starts": 1, "rounds": 20, "warm_up": 4}
TINY_STEPS: dict[str, Any] = {
    **{"recipe": None, "crop_size": 48, "crops": 2, "starts": 1, "rounds": 1, "parts": ["card"], "threads": 1},
    "overrides": ["body.base_channels=[8,8,16]", "norm.backend=eager"],
}
BY_NORM = ["start1/in-place", "start1/standard"]
BODIES = [  # the first rows of Table 3: their crops on each of four devices; compiling takes longest
    {"recipe": "table3/cityscapes_resnext101_inplace_fixed_crop", "crops": 4, "only": BY_NORM},
    {"recipe": "table3/cityscapes_wrn38_inplace_fixed_crop", "crops": 5, "only": BY_NORM},
    {"recipe": "table3/cityscapes_resnext101_inplace_fixed_crop", "crops": 4, "only": ["start1/compiled"]},
]
PARTS = {  # in the order in which they should be run
    "check": Part(3, check.BENCHMARK, [{}], {"only": ["trainings"]}),
    "steps": Part(7, training.BENCHMARK, [STEPS | body for body in BODIES], TINY_STEPS),
    "fit": Part(
        4.5,
        fit.BENCHMARK,
        [{}],
        {"device": "cpu", "tiny": True, "only": ["cityscapes_resnext101", "RevNet-104"]},
    ),
    "abn": Part(4, layers.BENCHMARK, ABN, TINY_LAYERS),
    "networks": Part(9, networks.BENCHMARK, [NETWORKS], TINY_NETWORKS),
    "train": Part(6, equal_memory.BENCHMARK, [CUDA], {"seeds": [0], "steps": 2, "only": ["standard"]}),
    "loss": Part(
        1,
        loss.BENCHMARK,
        [CUDA | {"classes": [19], "strides": [8], "crops": 8, "crop_size": 512}],
        {"classes": [3], "strides": [8], "crops": 1, "crop_size": 32, "rounds": 1},
    ),
    "host": Part(0.5, layers.BENCHMARK, [LAYERS | OF_HOST], TINY_LAYERS | OF_HOST | {"backend": "eager"}),
    "exact": Part(3.5, networks.BENCHMARK, [NETWORKS | EXACT | {"images": 8, "image_size": 64}], TINY_NETWORKS | EXACT),
    "ranks": Part(1.5, ranks.BENCHMARK, [CUDA], {"small": True}),
}


@dataclass
class GpuArguments:
    out: str = MISSING  # folder for gpu_PART.json and its picture
    measure: bool = True  # false: print and draw what DIR/gpu_PART.json holds, without a GPU
    part: str = key(ALL, one_of=(ALL, *PARTS))
    only: list[str] = field(default_factory=list)  # items of the part, or what their names begin with up to a slash
    camvid: str | None = None  # folder of CamVid, which part=train needs
    minutes: float = key(9, above=0)  # after which the item being measured is stopped
    rehearse: bool = False  # run every line on a CPU with tiny tensors; nothing is measured
    keep: bool = False  # add the records to those in docs/results, from which scripts.evidence.documents writes pages

    def check(self) -> None:
        if self.measure and not self.rehearse and not torch.cuda.is_available():
            raise ValueError("PyTorch sees no CUDA device: check the driver, or give rehearse=true or measure=false")
        named = self.measure and not self.rehearse and (self.part == "train" or self.camvid is not None)
        if named and not os.path.isdir(self.camvid or ""):
            raise ValueError(f"camvid={self.camvid or 'null'}: expected the folder of CamVid, which part=train needs")
        if self.keep and (self.measure or self.rehearse):
            raise ValueError("keep=true needs measure=false: look at what was measured on a GPU first")
        if self.only and self.part == ALL:
            raise ValueError(f"only=[{','.join(self.only)}] needs part=NAME, the part whose items these are")


def run(values: DictConfig) -> str:
    """Measure what is missing; return the tables, or of all parts what is left.

    ValueError: there is no CUDA device, no such item, or no record.
    """
    arguments = configuration.typed(values, GpuArguments)
    end_s = time.monotonic() + 60 * arguments.minutes
    with patch.dict(os.environ, {"TRITON_INTERPRET": "1"} if arguments.rehearse else {}):
        if arguments.part != ALL:
            return shown(arguments.part, arguments, end_s)
        if arguments.measure:
            return measured(arguments, end_s)
        found = [name for name in PARTS if file_of(name, arguments).is_file()]
        if not found:
            raise ValueError(f"measure=false shows records, and {arguments.out} has none")
        return "\n\n".join(shown(name, arguments, end_s) for name in found)


def shown(name: str, arguments: GpuArguments, end_s: float) -> str:
    """Measure what is missing of a part; return its tables."""
    benchmark, file = PARTS[name].benchmark, file_of(name, arguments)
    for given, called in calls_of(name, arguments, end_s) if arguments.measure else ():
        frame.measure(benchmark, given, arguments.rehearse, called)
    if arguments.keep:
        frame.add_calls(benchmark, file, RECORDS[benchmark.name])
    return frame.show(benchmark, file)


def measured(arguments: GpuArguments, end_s: float) -> str:
    """Measure what is missing of each part within its minutes, but nothing that has failed; say what is left."""
    lines, goes_on = dict[str, None](), False
    for name, part in PARTS.items():
        if name == "train" and arguments.camvid is None and not arguments.rehearse:
            lines["train: needs camvid=DIR"] = None
            continue
        file = file_of(name, arguments)
        used_s = sum(call["seconds"] for call in json.loads(file.read_text())["calls"]) if file.is_file() else 0
        own_s = math.inf if arguments.rehearse else time.monotonic() + 60 * part.minutes - used_s
        for given, called in calls_of(name, arguments, min(end_s, own_s)):
            left = frame.measure(part.benchmark, given, arguments.rehearse, called, again=False)["left"]
            lines |= {f"{name}: {item}: {why}": None for item, why in left.items()}
            goes_on |= own_s > end_s and any(not why.startswith(frame.FAILED) for why in left.values())
    end = "the same command goes on" if goes_on else "done; part=NAME tries again what is left of it"
    text = "\n".join([*lines, end])
    print(text)
    return text


def file_of(name: str, arguments: GpuArguments) -> Path:
    return Path(arguments.out) / f"{'rehearsed' if arguments.rehearse else 'gpu'}_{name}.json"


def calls_of(name: str, arguments: GpuArguments, end_s: float) -> Iterator[tuple[Any, str]]:
    """The arguments of each call of a part's benchmark, and the command for its record."""
    part, rehearse = PARTS[name], " rehearse=true" * arguments.rehearse
    shared: dict[str, Any] = {"out": str(file_of(name, arguments))}
    shared |= {"only": arguments.only} if arguments.only else {}
    shared |= {"camvid": arguments.camvid} if name == "train" else {}
    for own in [part.rehearsed] if arguments.rehearse else part.calls:
        left_min = max((end_s - time.monotonic()) / 60, 0)
        given = part.benchmark.schema(**own | shared, minutes=left_min)
        yield given, f"python -m scripts.gpu_evidence part={name}{rehearse} out=DIR"


main = configured("gpu_evidence", GpuArguments)(run)

if __name__ == "__main__":
    main()
