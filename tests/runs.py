"""Run the entries in tests as users do."""

import copy
import functools
import importlib
import os
import subprocess
import sys
from pathlib import Path

from omegaconf import DictConfig

from engine import command_line, config
from engine.schedule import Schedule
from engine.schema.classification import ClassificationRun
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


# The same for train_imagenet.py: drawn shapes.
SHORT_SHAPES = (
    *("body=resnext_tiny", "body.base_channels=[8,8,16]", "body.stem_channels=8", "norm.backend=eager"),
    *("data.crops_per_minibatch=6", "optim.lr=0.02", "trainer.epochs=null", "trainer.evaluate_every_epochs=null"),
    *("trainer.evaluate_images=24", "trainer.device=cpu"),
)


for entry in ("train_seg", "train_imagenet", "eval", "scripts.predict"):
    importlib.import_module(entry)  # declares the command


def composed(entry: str, *overrides: str) -> DictConfig:
    """The config that `python {entry}.py {overrides}` sees."""
    return command_line.composed(entry, *overrides)


@functools.lru_cache(maxsize=512)
def _checked(schema: type, entry: str, *overrides: str) -> SegmentationRun | ClassificationRun:
    return config.typed(composed(entry, *overrides), schema)


def run_config(*overrides: str) -> SegmentationRun:
    """The checked configuration of `python train_seg.py {overrides}`, which a test may change."""
    return copy.deepcopy(_checked(SegmentationRun, "train_seg", *overrides))


def classification_config(*overrides: str) -> ClassificationRun:
    """The checked configuration of `python train_imagenet.py {overrides}`, which a test may change."""
    return copy.deepcopy(_checked(ClassificationRun, "train_imagenet", *overrides))


def with_key(checked: config.Schema, key: str, value: object) -> config.Schema:
    """A copy of a configuration in which a key such as optim.lr has another value, not yet checked."""
    changed = copy.deepcopy(checked)
    *groups, name = key.split(".")
    setattr(functools.reduce(getattr, groups, changed), name, value)
    return changed


def command(entry: str, *overrides: str) -> list[str]:
    return [sys.executable, str(REPOSITORY / f"{entry}.py"), *overrides]


def run(entry: str, *overrides: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        command(entry, *overrides),
        cwd=REPOSITORY,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
