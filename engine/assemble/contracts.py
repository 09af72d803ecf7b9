"""What the choices of each group build, and how that is called: one contract per group, for ours and for plugins'."""

import importlib
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from inspect import Parameter, signature
from itertools import chain, product
from types import FrameType
from typing import Any, NamedTuple

from datasets.row import Row
from engine.process.allocations import is_out_of_memory
from engine.process.plugins import hidden_library
from engine.schema.additions import Augmentation, Logger, Score
from engine.schema.classification import ClassificationData, ImageNetData, SmallImagesData
from engine.schema.data import Data, Sampler, SegmentationData
from engine.schema.keys import Keys, chosen, groups_of
from engine.schema.network import Body, Head, Norm
from engine.schema.optim import LRSchedule, Optim
from engine.schema.segmentation import Loss, SegmentationRun
from engine.schema.training import CAPTURE_ADVICE, TrainingRun


class Contract(NamedTuple):
    """What `builds` names is called as the first base's `called_with` says, and with the choice's own keys by name."""

    bases: tuple[type[Any], ...]  # the program reads their keys; a choice's own keys are the others
    gives: str  # what the call returns
    methods: tuple[str, ...] = ()  # methods of the result
    optional: tuple[str, ...] = ()  # of `called_with`: handed on to what takes them
    asked: tuple[str, ...] = ()  # besides: handed on to what names them in its signature


_OURS = ("engine.", "datasets.", "models.", "keepless.", "torch.")
CONTRACTS: Mapping[str, Contract] = {
    "norm": Contract((Norm,), "a module, (N, channels, …) -> the same shape"),
    "body": Contract((Body,), "a models.bodies.body.Body"),
    # If what is built has `reads`, in_channels and features are lists: see `models.segmentation.features_read`.
    "head": Contract((Head,), "a module with out_channels, features -> features", asked=("classes",)),
    "loss": Contract((Loss,), "a module, logits, labels -> scalar"),  # its `forward` may name `batch` as well
    "data": Contract(
        (Data, SegmentationData, ClassificationData, ImageNetData, SmallImagesData),
        "a SegmentationDataset or ClassificationDataset",
    ),
    "sampler": Contract(
        (Sampler,), "an iterable of minibatches, lists of (epoch, number) or datasets.Draw", asked=("names",)
    ),
    # The groups of parameters have lr and weight_decay, too.
    "optim": Contract((Optim,), "a torch.optim.Optimizer", optional=("lr", "weight_decay", "fused")),
    "lr_schedule": Contract((LRSchedule,), "a torch.optim.lr_scheduler.LRScheduler"),
    "augmentations": Contract((Augmentation,), "a function: crop, label or None, np.random.Generator -> both"),
    "logger": Contract((Logger,), "an object with end(status)", ("end",)),
    "scores": Contract((Score,), "an object with add(prediction, label), counts and scores()", ("add", "scores")),
}


def builder(group: str, choice: Keys, more: Iterable[str] = ()) -> Callable[..., Any]:
    """What builds a choice: called with the arguments of its contract, it also gets the choice's own keys.

    `more`: further arguments that this call gives.
    ValueError, naming the choice: it cannot be imported, or does not take these arguments.
    """
    contract, kind, own = CONTRACTS[group], type(choice), own_keys(group, choice)
    made = imported(group, kind)
    made = made.make if isinstance(made, Row) else made
    asked = {name for name in contract.asked if name in signature(made).parameters and name not in own}
    unwanted = {*contract.asked} - asked | {name for name in contract.optional if not takes(made, name)}
    given = [name for name in contract.bases[0].called_with if name not in unwanted]
    first, others = given[:1], [*given[1:], *own, *more, *asked]
    try:
        signature(made).bind(*first, **dict.fromkeys(others))
    except TypeError as error:
        taken = ", ".join([*first, *(f"{name}=" for name in others)])
        raise ValueError(f"{_named(group, kind)}, which must take ({taken}): {error}") from error
    if lacking := [name for name in contract.methods if isinstance(made, type) and not hasattr(made, name)]:
        raise ValueError(f"{_named(group, kind)}, which has no {lacking[0]}(): expected {contract.gives}")

    def make(*first: Any, **given: Any) -> Any:
        return made(*first, **{**own, **{name: value for name, value in given.items() if name not in unwanted}})

    return make


def check_choices(config: TrainingRun) -> None:
    """Raise ValueError, naming the choice, if one of a run cannot be built as its contract says. Nothing is built."""
    for group in CONTRACTS.keys() & groups_of(type(config)).keys():
        for _, choice in chosen(group, getattr(config, group)):
            builder(group, choice)
    if config.trainer.capture is True and (problem := batch_problem(config)):
        raise ValueError(f"trainer.capture=true: {problem}; {CAPTURE_ADVICE}")


def batch_problem(config: TrainingRun) -> str | None:
    """Why a run is not captured in CUDA graphs whose loss asks for each micro-batch; None if it does not ask."""
    if not isinstance(config, SegmentationRun):
        return None
    forward = getattr(imported("loss", type(config.loss)), "forward", None)
    if forward is None or "batch" not in signature(forward).parameters:  # of a function's result, `loop.train` sees it
        return None
    return f"loss={config.loss.name} asks for each batch, and a CUDA graph would give it the first again"


@contextmanager
def parts_named(config: TrainingRun) -> Iterator[None]:
    """Context whose errors name the choice of one's own that raised them, or that they are about, if they do not."""
    try:
        yield
    except (MemoryError, FloatingPointError, ConnectionError):
        raise
    except Exception as error:
        name = None if is_out_of_memory(error) else _part_of(error, config)
        if name is None or name in str(error):
            raise
        about = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise ValueError(f"{name}: {about}{error}") from error


def _part_of(error: Exception, config: TrainingRun) -> str | None:
    """The choice, GROUP=NAME, whose code is the innermost in a traceback, or whose class begins the message."""
    parts = {}
    for group in CONTRACTS.keys() & groups_of(type(config)).keys():
        for _, choice in chosen(group, getattr(config, group)):
            part = imported(group, type(choice))
            part = part.make if isinstance(part, Row) else part
            if hasattr(part, "__name__") and not f"{part.__module__}.".startswith(_OURS):
                parts[part] = f"{group}={choice.name}"
    errors: list[BaseException] = [error]
    while (cause := errors[0].__cause__) is not None:
        errors.insert(0, cause)
    frames = [frame for cause in errors for frame, _ in [*traceback.walk_tb(cause.__traceback__)][::-1]]
    by_code = (name for frame, (part, name) in product(frames, parts.items()) if _runs(frame, part))
    by_message = (name for part, name in parts.items() if re.match(rf"(the head's )?{part.__name__}\b", str(error)))
    modules = {part.__module__: name for part, name in parts.items()}  # of a class that a function makes
    by_module = (modules[module] for frame in frames if (module := frame.f_globals.get("__name__")) in modules)
    return next(chain(by_code, by_message, by_module), None)


def _runs(frame: FrameType, part: Any) -> bool:
    """Whether a frame runs a function, or a method of a class."""
    return (
        isinstance(frame.f_locals.get("self"), part)
        if isinstance(part, type)
        else frame.f_code is getattr(part, "__code__", "")
    )


def imported(group: str, kind: type[Any]) -> Any:
    """What the class attribute `builds` of a choice is or names. ValueError, naming the choice: no such name."""
    if not isinstance(kind.builds, str):
        return kind.builds
    module, _, name = kind.builds.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        advice = hidden_library(error)
        raise ValueError(f"{_named(group, kind)}, which cannot be imported: {error}{advice}") from error


def own_keys(group: str, choice: Keys) -> dict[str, Any]:
    """Arguments that a choice hands on: its own keys, without its group's, and what `more` adds."""
    shared = {entry.name for base in CONTRACTS[group].bases for entry in fields(base)}
    own = [entry for entry in fields(choice) if entry.name not in shared and entry.metadata.get("is_argument", True)]
    found = {entry.name: getattr(choice, entry.name) for entry in own}
    if group == "data" and found:
        found["keys"] = "data."  # their prefix in messages
    return found | getattr(choice, "more", dict)()  # which may also replace values


def takes(made: Callable[..., Any], name: str) -> bool:
    """Whether a function or class takes an argument of this name."""
    own = signature(made).parameters
    return name in own or any(each.kind is Parameter.VAR_KEYWORD for each in own.values())


def _named(group: str, kind: type[Any]) -> str:
    made = kind.builds
    place = made if isinstance(made, str) else f"{made.__module__}.{getattr(made, '__qualname__', made)}"
    return f"{group}={kind.name} builds {place}"
