"""Every key of the schema is handed on: two values of it build something else.

A new key is covered if two values follow from its type and bounds. If not, the test says what to write here.
"""

import copy
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import Field, fields
from functools import partial, reduce
from pathlib import Path
from typing import Any

import pytest
from omegaconf import MISSING as NEEDED

from engine.configuration.config import RUNS
from engine.schema.evaluation import Evaluation, Prediction
from engine.schema.keys import Keys, complete_and_check, declared_in, groups_of, leaves
from engine.schema.training import TrainingRun
from tests import trees
from tests.datasets import classification_trees
from tests.engine.observed import of_evaluation, of_training

# Why nothing of a key can be seen here. A choice (body=timm) stands for all of its keys.
EXCEPTIONS = {
    **dict.fromkeys(
        ("plugins", "trust_plugins", "augmentations", "scores", "logger"), "choices of one's own: tests/test_plugins.py"
    ),
    "resume": "which checkpoint continues: tests/engine/checkpoint/test_run_directory.py",
    "init": "files of weights: tests/engine/checkpoint/test_initial_weights.py",
    **dict.fromkeys(("memory.fit", "memory.time"), "plans take seconds: tests/engine/training/test_planner.py"),
    "data.incomplete": "which data a row of a paper takes: tests/engine/training/test_run.py",
    "trainer.resume_check": "what runs instead: tests/engine/training/test_resumption.py",
    "trainer.profile": "when profiling begins: tests/engine/training/test_loop.py",
    "trainer.pictures": "what TensorBoard shows: tests/test_train_seg.py",
    "body=timm": "may not be installed; LibraryBody is body=torchvision's: tests/models/bodies/test_library.py",
    "body=torchvision norm.eps": "a library's norms keep their own: tests/models/bodies/test_library.py",
    "body.weights": "short for init.weights: tests/engine/checkpoint/test_initial_weights.py",
    "checkpoint": "which file is read: tests/engine/checkpoint/test_files.py",
    "input": "which files are read: tests/scripts/test_predict.py",
    **dict.fromkeys(
        ("output", "report", "probabilities", "top_k"), "which files are written: tests/scripts/test_predict.py"
    ),
}
# The choice of a group for the keys of others, where it is not the first one.
USUAL = {"norm": "inplace", "loss": "bootstrapped"}
# The choices with which the keys of another group are tried, too: a library's norms have options of their own.
CROSSED = {"body=torchvision": ("norm", "std")}
# Values of keys that have no default, and small ones.
SMALL: dict[str, Any] = {
    "trainer": {"epochs": 30, "device": "cpu"},
    "body": {"structure": [1, 1, 1, 1], "stem_channels": 8, "stem": "7x7"},
    "body=resnet": {"base_channels": [8, 8]},
    "body=resnext": {"base_channels": [8, 8, 16], "groups": 2},
    "body=densenet": {"growth": 8},
    "body=revnet": {"structure": [1] * 3, "channels": [[8, 8], [16, 16], [32, 32]], "stem": "cifar"},
    "body=wider_resnet": {"structure": [1] * 6, "channels": [[8, 8]] * 4 + [[8, 8, 8]] * 2},
    # Its norms' momentum is another than ours.
    "body=torchvision": {"network": "mnasnet0_5", "last": "layers.10"},
    "data=cifar10": {"val_split": "test"},
    "data=cifar100": {"val_split": "test"},
    "data": {"crop_size": 32, "crops_per_minibatch": 4, "workers": 0},
    "optim": {"lr": 0.1},
    "lr_schedule=multistep": {"steps": [4, 8]},
}
# Two values where they do not follow from the type, the bounds and the present value, which is ... here.
VALUES: dict[str, tuple[Any, Any]] = {
    "run_dir": (None, "DIR"),
    "data.root": (..., "NOWHERE"),
    "data=synthetic.root": (..., "STREETS"),
    "norm.activation": ("leaky_relu", "elu"),
    "norm.momentum": (None, 0.3),
    "lr_schedule.end": (..., 0.05),
    **dict.fromkeys(("predictions", "overlays", "per_image", "results"), (None, "DIR")),
    "body.network": ("mnasnet0_5", "mnasnet0_75"),
    "body.last": (..., "layers.9"),
    "body.downsampling": ("stride", "pool"),
    "body=revnet.channels": (..., [[16, 16], [16, 16], [32, 32]]),
    "body=wider_resnet.channels": (..., [[16, 16]] * 4 + [[8, 8, 8]] * 2),
    "data.train_split": ("train", "val"),
    "data.val_split": (..., "train"),
    "data.split": (None, "train"),
    "data.class_order": ("text", "numbers"),
    "sampler.folder": (None, "INDEX"),
    "precision": (None, "bfloat16"),
    "activation": (None, "elu"),  # whose usual parameter differs
    "lr_schedule.epochs": ([1], [2]),
    "data.image_folder": ("images", "pictures"),
    "data.label_folder": ("labels", "masks"),
    "loss.class_weights": ("none", "frequency"),
    "data.label_suffix": ("", "_mask"),
    "data.shown": (None, [3, 2, 1]),
    "data.mean": ([0.0, 0.0, 0.0], [0.2, 0.4, 0.6]),
    "data.std": ([0.2, 0.4, 0.6], [1.0, 1.0, 1.0]),
    **dict.fromkeys(("data.workers", "workers"), (0, 2)),
    "memory.activations": ("1GiB", "2GiB"),
    "memory.budget": (None, "12GiB"),
    "memory.gpus": (None, 3),
    "trainer.evaluate_images": (None, 1),
    "trainer.evaluate_batch_size": (2, 3),
    "window.size": (None, 64),
    "head.pooling_size": (None, [2, 3]),
    "crop": (None, 16),
    "resize": (None, 40),
}
# What a key needs to be seen, besides itself.
BESIDES: dict[str, dict[str, Any]] = {
    "memory.activations": {"trainer.recompute": "budget"},
    "trainer.patience": {"trainer.evaluate_every_steps": 5},
    "sampler.folder": {"loss.class_weights": "frequency"},
    "lr_schedule.epochs": {"lr_schedule.steps": None},
    "norm.activation_param": {"norm.activation": "leaky_relu"},
    "memory.gpus": {"memory.budget": "12GiB"},
    "window.overlap": {"window.size": 64},
    "data.mean_image": {"data.mean": [0.0, 0.0, 0.0]},
    "optim.nesterov": {"optim.momentum": 0.9},
    "data.crop_size": {"data.resize": 64},
    "data.resize": {"data.crop_size": 16},
}


def small_choice(group: str, name: str, cls: type[Any], roots: dict[str, str]) -> Keys:
    """A choice of a group, with small values."""
    values = {**SMALL.get(group, {}), **SMALL.get(f"{group}={name}", {}), "name": name, "root": roots.get(name)}
    names = {entry.name for entry in fields(cls)}
    config = cls(**{key: value for key, value in values.items() if key in names})
    for key, value, _ in leaves(config, f"{group}."):
        assert value != NEEDED, f"{key} has no default: give SMALL a value for it, under {group} or {group}={name}"
    return config


def configuration(task: str, roots: dict[str, str], **choices: str) -> TrainingRun:
    """A small training, not yet checked."""
    keys = declared_in(RUNS[task])
    groups = {group: kinds for group, kinds in groups_of(RUNS[task]).items() if "is_list" not in keys[group].metadata}
    names = {group: choices.get(group) or USUAL.get(group) or next(iter(groups[group])) for group in groups}
    values = {group: small_choice(group, name, groups[group][name], roots) for group, name in names.items()}
    config = RUNS[task](**values)
    vars(config.trainer).update(SMALL["trainer"])
    return config


def near_values(entry: Field, value: Any) -> Iterator[Any]:
    """Values near one that a key may take."""
    if entry.metadata.get("one_of") is not None:
        yield from entry.metadata["one_of"]
    elif isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (2 * value, value + 1, value - 1)
    elif isinstance(value, float):
        yield from (value / 2, value + 0.25, 2.0)
    elif isinstance(value, list) and all(isinstance(number, (int, float)) for number in value):
        for change in (lambda number: 2 * number, lambda number: number + 1, lambda number: number / 2):
            yield [type(number)(change(number)) for number in value]
    elif value is None and entry.metadata.get("word") is None:
        kind = float if "float" in str(entry.type) else int if "int" in str(entry.type) else None
        if "bool" in str(entry.type):
            yield False
        if kind is not None and "list" not in str(entry.type):
            yield from (kind(3), kind(0.5))
    elif entry.metadata.get("word") is not None:
        yield from (False, True) if entry.metadata.get("least") is None else (2, 3)


def with_keys(config: Keys, changes: dict[str, Any]) -> Any:
    """A checked copy with other values of the keys that it has."""
    changed = copy.deepcopy(config)
    for key, value in changes.items():
        *groups, name = key.split(".")
        owner = reduce(getattr, groups, changed)
        if hasattr(owner, name):
            setattr(owner, name, copy.deepcopy(value))
    complete_and_check(changed)
    return changed


def two_values(config: Keys, key: str, value: Any, entry: Field, choice: str) -> list[Any]:
    """Two configurations with other values of a key."""
    problems = []
    pair = VALUES.get(f"{choice}.{key.partition('.')[2]}", VALUES.get(key))
    pairs = [pair] if pair else ((value, near) for near in near_values(entry, value) if near != value)
    for pair in pairs:
        try:
            values = [value if part is ... else part for part in pair]
            return [with_keys(config, {**BESIDES.get(key, {}), key: part}) for part in values]
        except ValueError as error:
            problems.append(str(error))
    pytest.fail(
        f"{key}, {choice}: no two values follow from its type and bounds {problems}. In {__file__}, give VALUES two, "
        f"and BESIDES the keys without which they cannot be seen; or say in EXCEPTIONS why nothing can be seen"
    )


def same(keys: Iterator[tuple[str, Any, Field]], config: Keys, choice: str, observe: Callable) -> list[str]:
    """The keys of which two values build the same. `observe(configuration)` returns lines."""
    equal_keys = []
    for key, value, entry in keys:
        group = key.partition(".")[0]
        if key.endswith(".name") or {key, group, choice, f"{choice} {key}"} & EXCEPTIONS.keys():
            continue
        first, second = two_values(config, key, value, entry, choice)
        if observe(first) == observe(second):
            equal_keys.append(key)
    return equal_keys


def choices_of(task: str) -> Iterator[str]:
    """ "train", for the keys outside of groups, and "norm=std", …"""
    yield "train"
    for group, alternatives in groups_of(RUNS[task]).items():
        yield from (f"{group}={name}" for name in alternatives)


_observed: dict[str, Counter[str]] = {}  # by configuration; cleared between the tasks that eval.py has


def observed(observe: Callable, config: Any) -> Counter[str]:
    """The lines of `observe`, or the error's."""
    if (key := f"{type(config)}{config}") not in _observed:
        try:
            _observed[key] = observe(copy.deepcopy(config))
        except ValueError as error:
            _observed[key] = Counter([f"ValueError: {error}"])
    return _observed[key]


@pytest.fixture(scope="module")
def roots() -> Iterator[dict[str, str]]:
    """Small datasets, by name."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr("tests.runs.DRAWN", {"synthetic": {"train": 4, "val": 2}, "shapes": {"train": 16, "val": 8}})
        patch.setattr("engine.assemble.data.cores_per_rank", lambda: 2)  # and as many data workers
        roots = {name: make(Path(folder, name)) for name, make in trees.SEGMENTATION.items()}
        roots["cifar10"] = classification_trees.cifar10_python(Path(folder, "cifar10"), patch)
        roots["cifar100"] = classification_trees.cifar100_python(Path(folder, "cifar100"), patch)
        classes = classification_trees.imagenet(Path(folder, "imagenet"))
        for number, above in enumerate(sorted(classes.glob("*/*"))):
            above.rename(above.with_name(str(8 + number % 3)))  # 8, 9, 10
        roots |= dict.fromkeys(("imagenet", "image_folder"), classes)
        yield {name: str(root) for name, root in roots.items()}


@pytest.mark.table
@pytest.mark.parametrize("task, choice", [(task, choice) for task in RUNS for choice in choices_of(task)])
def test_every_key_of_a_training_is_handed_on(task, choice, roots):
    groups, (group, _, name) = groups_of(RUNS[task]), choice.partition("=")
    if choice in EXCEPTIONS:
        return
    crossed, *names = CROSSED.get(choice, ("", ""))
    config = configuration(task, roots, **({group: name} if name else {}), **({crossed: names[0]} if crossed else {}))
    prefixes = (f"{group}.", *([f"{crossed}."] if crossed else []))
    keys = [
        leaf
        for leaf in leaves(config)
        if leaf[0].startswith(prefixes) or not name and leaf[0].partition(".")[0] not in groups
    ]
    not_handed_on = same(iter(keys), config, choice, partial(observed, of_training))
    assert not not_handed_on, f"both values of {', '.join(not_handed_on)} build the same: is the key handed on?"


@pytest.mark.parametrize("task, schema", [(task, schema) for task in RUNS for schema in (Evaluation, Prediction)])
def test_every_key_of_an_evaluation_is_handed_on(task, schema, roots):
    data = {"segmentation": "camvid", "classification": "imagenet"}[task]
    trained = configuration(task, roots, data=data)
    complete_and_check(trained)
    _observed.clear()
    options = schema(checkpoint="net.pt")
    keys = (leaf for leaf in leaves(options) if leaf[2].metadata.get("task") in (None, task))
    observe = lambda options: of_evaluation(options, copy.deepcopy(trained))  # noqa: E731
    not_handed_on = same(keys, options, schema.__name__, partial(observed, observe))
    assert not not_handed_on, f"both values of {', '.join(not_handed_on)} build the same: is the key handed on?"
