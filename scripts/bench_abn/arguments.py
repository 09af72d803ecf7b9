"""The arguments of the benchmark, their defaults on each device, and the rules they obey."""

import json
from dataclasses import dataclass, field, fields

import torch
from omegaconf import MISSING

from models.layers.backends import check_backend

from .cells import DTYPES, GROUPS, LAYOUTS


@dataclass
class Benchmark:
    """Null stands for the device's own default, see DEVICE_DEFAULTS."""

    out: str = MISSING  # FILE.json; the page and the chart are written beside it
    measure: bool = True
    device: str = "cpu"
    groups: list[str] | None = None
    dtypes: list[str] | None = None
    layouts: list[str] = field(default_factory=lambda: list(LAYOUTS))
    batch: int | None = None
    channels: list[int] = field(default_factory=lambda: [256, 512, 1024, 2048])  # of CONV1 … CONV4
    pixels: list[int] = field(default_factory=lambda: [56, 28, 14, 7])  # sides of their maps
    backend: str = "auto"  # of the checkpointing and in-place strategies; in-place II is measured with each
    large: bool = True  # BN + ACT also on a tensor that no cache holds
    rounds: int | None = None
    sample_ms: float | None = None  # one time is the mean over repeats that take this long
    compiler: str | None = "inductor"  # of torch.compile, for whole blocks; null leaves those strategies out
    graphs: bool = False  # CUDA: replay captured graphs, so that the time to launch kernels does not count
    minutes: float | None = None  # cells that would begin later are left out


DEVICE_DEFAULTS = {
    "cpu": {
        "groups": list(GROUPS),
        "dtypes": ["float32"],
        "batch": 4,
        "rounds": 15,
        "sample_ms": 20.0,
        "minutes": 12.0,
    },
    "cuda": {
        "groups": ["bn_act", "bn_act_conv"],
        "dtypes": ["float32", "bfloat16"],
        "batch": 32,
        "rounds": 20,
        "sample_ms": 8.0,
        "minutes": 4.5,
    },
}


def with_defaults(config: Benchmark) -> Benchmark:
    """The config with a value for every key.

    Raises:
        ValueError: a value is not possible, or the device is not there.
    """
    if config.device not in DEVICE_DEFAULTS:
        raise ValueError(f"device={config.device}: expected cpu or cuda")
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device=cuda: PyTorch sees no CUDA device; device=cpu needs none")
    defaults = DEVICE_DEFAULTS[config.device]
    values = {key: defaults[key] if value is None and key in defaults else value for key, value in vars(config).items()}
    config = Benchmark(**values)
    for key, known in (("groups", GROUPS), ("dtypes", DTYPES), ("layouts", LAYOUTS)):
        given = getattr(config, key)
        if not given or not set(given) <= set(known):
            raise ValueError(f"{key}={given}: expected some of {', '.join(known)}")
    check_backend(config.backend)
    for key in ("batch", "rounds", "sample_ms", "minutes"):
        if not getattr(config, key) > 0:
            raise ValueError(f"{key}={getattr(config, key)}: expected a number above 0")
    if len(config.channels) != len(config.pixels) or min([*config.channels, *config.pixels], default=0) < 1:
        raise ValueError(f"channels={config.channels} pixels={config.pixels}: expected as many sides as channel counts")
    if any(c % 2 for c in config.channels):
        raise ValueError(f"channels={config.channels}: expected even numbers, the convolution halves them")
    if config.graphs and config.device != "cuda":
        raise ValueError("graphs=true needs device=cuda")
    return config


def command_line(config: Benchmark) -> str:
    """The command line that measures the same again."""
    defaults = DEVICE_DEFAULTS[config.device]
    words = []
    for entry in fields(Benchmark)[2:]:
        value = getattr(config, entry.name)
        default = defaults.get(entry.name, getattr(Benchmark(), entry.name))
        if value != default or entry.name == "device":
            words.append(f"{entry.name}={json.dumps(value, separators=(',', ':'))}".replace('"', ""))
    return " ".join(["python -m scripts.bench_abn", *words, "out=FILE.json"])
