"""Measure on a CUDA device what the documents claim about it, in parts of at most eight minutes:

    python -m scripts.gpu_evidence part=check|steps|fit|abn|networks|train|host|exact|ranks out=DIR [camvid=DIR]
    python -m scripts.gpu_evidence part=abn rehearse=true out=DIR   # on a CPU, to check that every line runs
    python -m scripts.gpu_evidence part=abn measure=false out=DIR   # tables and picture from the record, without a GPU

A part is a benchmark of scripts/evidence with certain arguments. DIR/gpu_PART.json is written after each item, and the
same command adds what is missing. docs/results/gpu.md says how many minutes each part takes, and what was measured.
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
from scripts.evidence.layers import HOST
from scripts.evidence.zoo import DECODER
from scripts.reports import frame


class Part(NamedTuple):
    """A benchmark, and its arguments in each call, on a card and in a rehearsal."""

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
    **{"device": "cuda", "images": 128, "precisions": ["float32", "bfloat16"], "shares": [0.3], "rounds": 10},
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
BODIES: dict[str, dict[str, Any]] = {  # crops: of the first rows of Table 3, on each of four devices
    "resnext101": {"crops": 4},
    "wrn38": {"crops": 5, "only": ["start1/in-place", "start1/standard"]},
}
PARTS = {  # in the order in which they should be run
    "check": Part(check.BENCHMARK, [{}], {"only": ["trainings"]}),
    "steps": Part(
        training.BENCHMARK,
        [STEPS | {"recipe": f"table3/cityscapes_{body}_inplace_fixed_crop"} | own for body, own in BODIES.items()],
        TINY_STEPS,
    ),
    "fit": Part(fit.BENCHMARK, [{}], {"device": "cpu", "tiny": True, "only": ["cityscapes_resnext101", "RevNet-104"]}),
    "abn": Part(layers.BENCHMARK, ABN, TINY_LAYERS),
    "networks": Part(networks.BENCHMARK, [NETWORKS], TINY_NETWORKS),
    "train": Part(equal_memory.BENCHMARK, [CUDA], {"seeds": [0], "steps": 2, "only": ["standard"]}),
    "host": Part(layers.BENCHMARK, [LAYERS | OF_HOST], TINY_LAYERS | OF_HOST | {"backend": "eager"}),
    "exact": Part(networks.BENCHMARK, [NETWORKS | EXACT | {"images": 8, "image_size": 64}], TINY_NETWORKS | EXACT),
    "ranks": Part(ranks.BENCHMARK, [CUDA], {"small": True}),
}


@dataclass
class GpuArguments:
    out: str = MISSING  # folder for gpu_PART.json and its picture
    measure: bool = True  # false: print and draw what DIR/gpu_PART.json holds, without a GPU
    part: str = key(MISSING, one_of=tuple(PARTS))  # check, steps, fit, abn, networks, train, host, exact or ranks
    only: list[str] = field(default_factory=list)  # items of the part, or what their names begin with up to a slash
    camvid: str | None = None  # folder of CamVid, which part=train needs
    minutes: float = key(7.8, above=0)  # after which the item being measured is stopped
    rehearse: bool = False  # run every line on a CPU with tiny tensors; nothing is measured


def run(values: DictConfig) -> str:
    """Measure what is missing of a part; return its tables. ValueError: there is no CUDA device, or no such item."""
    arguments, started_s = configuration.typed(values, GpuArguments), time.monotonic()
    part, measures = PARTS[arguments.part], arguments.measure
    if measures and not arguments.rehearse:
        device_of("cuda")
    file = Path(arguments.out) / f"{'rehearsed' if arguments.rehearse else 'gpu'}_{arguments.part}.json"
    called = f"python -m scripts.gpu_evidence part={arguments.part}{' rehearse=true' * arguments.rehearse} out=DIR"
    shared: dict[str, Any] = {"out": str(file), "measure": measures}
    shared |= {"only": arguments.only} if arguments.only else {}
    shared |= {"camvid": arguments.camvid} if arguments.part == "train" else {}
    with patch.dict(os.environ, {"TRITON_INTERPRET": "1"} if arguments.rehearse else {}):
        for own in [part.rehearsed] if arguments.rehearse else part.calls:
            left_min = arguments.minutes - (time.monotonic() - started_s) / 60
            given = part.benchmark.schema(**own | shared, minutes=max(left_min, 1e-9))
            text = frame.carry_out(part.benchmark, given, arguments.rehearse, called)
    return text


main = configured("gpu_evidence", GpuArguments)(run)

if __name__ == "__main__":
    main()
