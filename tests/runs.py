"""Run the entries in tests as users do, and compare what they leave."""

import copy
import functools
import hashlib
import importlib
import os
import pickle
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import hydra
import pytest
import torch
from hydra._internal import config_loader_impl
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository, IConfigRepository
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigResult
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor

from datasets import synthetic
from engine.configuration import command_line, config
from engine.configuration.choices import groups_in
from engine.schema.classification import ClassificationRun
from engine.schema.schedule import Schedule
from engine.schema.segmentation import SegmentationRun

REPOSITORY = Path(__file__).resolve().parent.parent

# A run of a few steps takes seconds: the default network on small crops of the synthetic streets. It is on the CPU,
# where two runs are equal to the bit.
SHORT = (
    *("data.crop_size=64", "data.crops_per_minibatch=2", "data.workers=0", "norm.backend=eager"),
    *("trainer.evaluate_images=2", "trainer.device=cpu"),
)


def one_epoch(steps: int) -> Schedule:
    """The schedule of a run of one epoch that saves and evaluates at its end only."""
    return Schedule(steps, steps_per_epoch=steps, evaluate_every=None, checkpoint_every=steps, log_every=steps)


NARROW_A2 = (  # a body with dropout
    *("body=wider_resnet38_a2", "body.structure=[1,1,1,1,1,1]", "body.stem_channels=8"),
    "body.channels=[[8,8],[8,8],[8,8],[8,8],[8,8,8],[8,8,8]]",
)
# The same for train_imagenet.py: drawn shapes.
SHORT_SHAPES = (
    *("body=resnext_tiny", "body.base_channels=[8,8,16]", "body.stem_channels=8", "norm.backend=eager"),
    *("data.crops_per_minibatch=6", "optim.lr=0.02", "trainer.epochs=null", "trainer.evaluate_every_epochs=null"),
    *("trainer.evaluate_images=24", "trainer.device=cpu"),
)


_compose = hydra.compose


@functools.cache
def _pickled(name: str, *groups: str) -> bytes:
    """A composed configuration, from a file that all test processes share."""
    file = Path(os.environ["XDG_CACHE_HOME"], "composed", hashlib.sha1(repr((name, groups)).encode()).hexdigest())
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_name(f"{file.name}.{os.getpid()}")
        partial.write_bytes(pickle.dumps(_compose(name, [*groups])))
        partial.rename(file)
    return file.read_bytes()


@functools.cache
def _chosen(name: str, choice: str) -> DictConfig:
    """The keys of a group, of which a choice such as norm=std is given. Nobody may change them."""
    return pickle.loads(_pickled(name, choice))[choice.partition("=")[0]]


# Choices that set keys of their own group alone, so that each is composed once, whatever the others are.
OWN = re.compile(r"(norm|body|head|data|sampler|loss|optim|lr_schedule)=\w+")


def _of_choices(name: str, choices: list[str]) -> DictConfig:
    chosen = {choice.partition("=")[0]: choice for choice in choices if OWN.fullmatch(choice)}
    if len(chosen) < max(2, len(choices)):
        return pickle.loads(_pickled(name, *choices))
    config = pickle.loads(_pickled(name))
    for group, choice in chosen.items():
        config[group] = _chosen(name, choice)
    return config


def compose(name: str, words: Sequence[str] = ()) -> DictConfig:
    """Replaces Hydra's, which takes a tenth of a second: each choice is composed once."""
    parsed = OverridesParser.create().parse_overrides([*words])
    groups = {"hydra", *groups_in(name)}
    keys = [word for word in parsed if word.key_or_group not in groups or isinstance(word.value(), dict)]
    try:
        config = _of_choices(name, [override.input_line for override in parsed if override not in keys])
        OmegaConf.set_struct(config, True)
        ConfigLoaderImpl.validate_sweep_overrides_legal(keys, RunMode.RUN, from_shell=True)
        ConfigLoaderImpl._apply_overrides_to_config(keys, config)
        return config
    except (HydraException, OmegaConfBaseException):  # the message is to be Hydra's
        return _compose(name, [*words])


class Repository(CachingConfigRepository):
    """Replaces Hydra's, which copies its sources for every configuration, and reads their files again."""

    read: dict[str, bytes] = {}

    def __init__(self, delegate: IConfigRepository):
        self.delegate, self.cache = delegate, {}

    def load_config(self, config_path: str) -> ConfigResult | None:
        if config_path not in self.cache:
            if config_path not in self.read and (loaded := self.delegate.load_config(config_path)):
                self.read[config_path] = pickle.dumps(loaded)
            self.cache[config_path] = pickle.loads(self.read.get(config_path, pickle.dumps(None)))
        return self.cache[config_path]


# Images that are drawn for a training and an evaluation.
DRAWN = {"synthetic": {"train": 60, "val": 8}, "shapes": {"train": 400, "val": 200}}


def hasten(patch: pytest.MonkeyPatch) -> None:
    """Leave out what takes most of the time of a short run: composing in full, and drawing many images.

    Also the stack traces that `torch.manual_seed` formats for each kind of device that the machine does not have.
    """
    for device in (torch.cuda, torch.xpu, torch.mtia):
        if not device.is_available():
            patch.setattr(device, "manual_seed_all", lambda seed: None)
    patch.setattr(hydra, "compose", compose)
    patch.setattr(config_loader_impl, "CachingConfigRepository", Repository)
    for name, images in DRAWN.items():
        for split, count in images.items():
            patch.setitem(importlib.import_module(f"datasets.{name}").IMAGES, split, count)
    defaults = (tuple(DRAWN["synthetic"].values()), *synthetic.__defaults__[1:])
    patch.setattr(synthetic, "__defaults__", defaults)


for entry in ("train_seg", "train_imagenet", "eval", "scripts.predict"):
    importlib.import_module(entry)  # declares the command


def checked(entry: str, *overrides: str) -> Any:
    """The checked keys that `python {entry}.py {overrides}` starts with."""
    return command_line.checked(entry, *overrides)


_once = functools.lru_cache(maxsize=512)(checked)


def run_config(*overrides: str) -> SegmentationRun:
    """The checked configuration of `python train_seg.py {overrides}`, which a test may change."""
    return copy.deepcopy(_once("train_seg", *overrides))


def classification_config(*overrides: str) -> ClassificationRun:
    """The checked configuration of `python train_imagenet.py {overrides}`, which a test may change."""
    return copy.deepcopy(_once("train_imagenet", *overrides))


def with_key(config_of_run: config.Schema, key: str, value: object) -> config.Schema:
    """A copy of a configuration in which a key such as optim.lr has another value, not yet checked."""
    changed = copy.deepcopy(config_of_run)
    *groups, name = key.split(".")
    setattr(functools.reduce(getattr, groups, changed), name, value)
    return changed


def command(entry: str, *overrides: str) -> list[str]:
    return [sys.executable, str(REPOSITORY / f"{entry}.py"), *overrides]


def ended(module: str, output: Path, *overrides: str) -> tuple[str | int | None, str]:
    """Return a command's exit status and output; it runs in this process, with a stream that takes UTF-8 alone."""
    with pytest.MonkeyPatch.context() as patch, open(output, "w", encoding="utf-8") as file:
        patch.setattr(sys, "argv", [module, *overrides])
        patch.setattr(sys, "stdout", file)
        with pytest.raises(SystemExit) as stopped:
            importlib.import_module(module).main()
        sys.stdout.flush()
    return stopped.value.code, output.read_text()


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """Equal names, and tensors equal to the bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def without_counts(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors without `num_batches_tracked`, which released files lack."""
    return {name: tensor for name, tensor in state.items() if "num_batches" not in name}
