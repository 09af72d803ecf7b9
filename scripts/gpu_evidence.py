"""Measure on a CUDA device what the documents claim of one, in parts of at most eight minutes:

    python -m scripts.gpu_evidence part=check|host|exact|abn|networks|steps|fit|train|ranks out=DIR [only=[…]]
    python -m scripts.gpu_evidence part=train camvid=DIR out=DIR
    python -m scripts.gpu_evidence part=abn rehearse=true out=DIR   # on a CPU, to see that every line runs
    python -m scripts.gpu_evidence part=abn measure=false out=DIR   # page and picture from the record, without a GPU

A part is a benchmark of scripts/evidence with certain arguments. DIR/gpu_PART.json is written after each item, and the
same command adds what is missing. docs/reproducing.md lists the parts in order, with the minutes that they should take.
"""

import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from omegaconf import MISSING, DictConfig

from engine.configuration import config as configuration
from engine.configuration.command_line import configured
from engine.process.distributed import device_of
from engine.schema.keys import key
from scripts.evidence import check, equal_memory, fit, layers, networks, ranks, training
from scripts.evidence.layers import BLOCKS, HOST
from scripts.evidence.zoo import DECODER
from scripts.reports import frame


class Part(NamedTuple):
    """A benchmark, and its arguments in each call, on a card and in a rehearsal."""

    benchmark: frame.Benchmark
    calls: list[dict[str, Any]]
    rehearsed: dict[str, Any]


CUDA: dict[str, Any] = {"device": "cuda"}
TINY_LAYERS: dict[str, Any] = {
    **{"backend": "triton", "compiler": "aot_eager", "dtypes": ["float32"]},
    **{"rounds": 1, "sample_ms": 0.01, "layouts": ["channels_last"], "batch": 2, "channels": [2], "pixels": [2]},
}
TINY_NETWORKS: dict[str, Any] = {
    **{"networks": ["squeezenet1_1", DECODER], "precisions": ["bfloat16"], "images": 2, "image_size": 32},
    **{"shares": [0.5], "rounds": 1, "compiler": None},
}
TINY_STEPS = ["body.base_channels=[8,8,16]", "body.stem_channels=8", "norm.backend=eager"]
EXACT: dict[str, Any] = {"exact": True, "precisions": ["float64", "float32", "bfloat16"], "compiler": None, "rounds": 1}
TABLE_3 = "table3/cityscapes_{}_inplace_fixed_batch"
PARTS = {  # in the order in which they should be run
    "check": Part(check.BENCHMARK, [{}], {"processes": 1, "most": 2}),
    "host": Part(layers.BENCHMARK, [CUDA | {"groups": [*HOST]}], TINY_LAYERS | {"groups": [*HOST], "backend": "eager"}),
    "exact": Part(networks.BENCHMARK, [CUDA | EXACT | {"images": 8, "image_size": 64}], TINY_NETWORKS | EXACT),
    "abn": Part(layers.BENCHMARK, [CUDA | {"rounds": 20}], TINY_LAYERS | {"groups": [*BLOCKS]}),
    "networks": Part(networks.BENCHMARK, [CUDA | {"rounds": 10}], TINY_NETWORKS),
    "steps": Part(
        training.BENCHMARK,
        [
            CUDA | {"recipe": TABLE_3.format(body), "crops": crops, "starts": 1, "rounds": 20}
            for body, crops in fit.BODIES.items()
        ],
        {"recipe": None, "crop_size": 48, "crops": 2, "starts": 1, "rounds": 1, "parts": ["memory"], "threads": 1}
        | {"compiler": "aot_eager", "overrides": TINY_STEPS},
    ),
    "fit": Part(fit.BENCHMARK, [{}], {"device": "cpu", "tiny": True}),
    "train": Part(equal_memory.BENCHMARK, [CUDA], {"seeds": [0], "steps": 2}),
    "ranks": Part(ranks.BENCHMARK, [CUDA | {"rounds": 10}], {"small": True, "rounds": 1}),
}
ENVIRONMENT = {"KINETO_LOG_LEVEL": "99"}  # hides the profiler's log


@dataclass
class GpuArguments:
    out: str = MISSING  # folder for gpu_PART.json, its page and its picture
    measure: bool = True  # false: make page and picture from DIR/gpu_PART.json, without a GPU
    part: str = MISSING  # check, host, exact, abn, networks, steps, fit, train or ranks
    only: list[str] = field(default_factory=list)  # items of the part, or what their names begin with up to a slash
    camvid: str | None = None  # folder of CamVid, which part=train needs
    minutes: float = key(7.8, above=0)  # after which the item that is measured is stopped
    rehearse: bool = False  # on a CPU, on tiny tensors: every line runs, and nothing is measured

    def check(self) -> None:
        if self.part not in PARTS:
            raise ValueError(f"part={self.part}: expected one of {', '.join(PARTS)}")
        out = Path(self.out).resolve()
        if self.rehearse and frame.RESULTS in (out, *out.parents):
            raise ValueError(f"rehearse=true out={self.out}: docs/results has results alone; give another folder")


def run(values: DictConfig) -> Path:
    """Measure what is missing of a part; return its page. ValueError: there is no CUDA device, or no item in `only`."""
    arguments, started_s = configuration.typed(values, GpuArguments), time.monotonic()
    part, measures = PARTS[arguments.part], arguments.measure
    if measures and not arguments.rehearse:
        device_of("cuda")
    file = Path(arguments.out) / f"{'rehearsed' if arguments.rehearse else 'gpu'}_{arguments.part}.json"
    called = f"python -m scripts.gpu_evidence part={arguments.part}{' rehearse=true' * arguments.rehearse} out=DIR"
    shared = {"out": str(file), "measure": measures, "only": arguments.only}
    shared |= {"camvid": arguments.camvid} if arguments.part == "train" else {}
    interpreted = {"TRITON_INTERPRET": "1"} if arguments.rehearse else {}
    with patch.dict(os.environ, ENVIRONMENT | interpreted):
        for own in [part.rehearsed] if arguments.rehearse else part.calls:
            left_min = arguments.minutes - (time.monotonic() - started_s) / 60
            given = part.benchmark.schema(**own, **shared, minutes=max(left_min, 1e-9)).suited()
            page = frame.carry_out(part.benchmark, given, arguments.rehearse, called)
    return page


@configured("gpu_evidence", GpuArguments)
def main(values: DictConfig) -> None:
    print(run(values))


if __name__ == "__main__":
    main()
