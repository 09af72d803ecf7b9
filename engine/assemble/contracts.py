"""What the choices of each group build, and how that is called: one contract per group, for ours and for plugins'."""

import importlib
import itertools
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from inspect import Parameter, Signature, signature
from types import FrameType
from typing import Any, NamedTuple

from torch import nn, optim

from datasets import ClassificationDataset, SegmentationDataset
from datasets.row import Row
from engine.process.allocations import is_out_of_memory
from engine.process.plugins import hidden_library
from engine.process.stopping import Preempted
from engine.schema.additions import Augmentation, Logger, Score
from engine.schema.classification import ClassificationData, ImageNetData, SmallImagesData
from engine.schema.data import Data, Sampler, SegmentationData
from engine.schema.keys import Keys, chosen, groups_of
from engine.schema.network import Body, Head, Norm
from engine.schema.optim import LRSchedule, Optim
from engine.schema.segmentation import Loss, SegmentationRun
from engine.schema.training import CAPTURE_ADVICE, TrainingRun
from models import bodies


class Contract(NamedTuple):
    """What `builds` names is called as the first base's `called_with` says, and with the choice's own keys by name."""

    bases: tuple[type[Any], ...]  # the program reads their keys; a choice's own keys are the others
    gives: str  # what the call returns
    product: type | tuple[type, ...] = object  # its class
    methods: tuple[str, ...] = ()  # methods of the result
    optional: tuple[str, ...] = ()  # arguments of `called_with` that it may lack
    on_request: tuple[str, ...] = ()  # further arguments, for what names them in its signature


_OURS = ("engine.", "datasets.", "models.", "keepless.", "torch.", "builtins.")
_CLASSES_MADE: dict[type, str] = {}  # GROUP=NAME by the class of what a choice of one's own has made
CONTRACTS: Mapping[str, Contract] = {
    "norm": Contract((Norm,), "a module, (N, channels, …) -> the same shape", nn.Module),
    "body": Contract((Body,), "a models.bodies.body.Body", bodies.Body),
    # If what is built has `reads`, in_channels and features are lists: see `models.segmentation.features_read`.
    "head": Contract((Head,), "a module with out_channels, features -> features", nn.Module, on_request=("classes",)),
    "loss": Contract((Loss,), "a module, logits, labels -> scalar", nn.Module),  # its `forward` may name `batch`
    "data": Contract(
        (Data, SegmentationData, ClassificationData, ImageNetData, SmallImagesData),
        "a SegmentationDataset or ClassificationDataset",
        (SegmentationDataset, ClassificationDataset),
    ),
    "sampler": Contract(
        (Sampler,), "an iterable of minibatches, lists of (epoch, number) or datasets.Draw", on_request=("names",)
    ),
    # The groups of parameters have lr and weight_decay, too.
    "optim": Contract((Optim,), "a torch.optim.Optimizer", optim.Optimizer, optional=("lr", "weight_decay", "fused")),
    "lr_schedule": Contract((LRSchedule,), "a torch.optim.lr_scheduler.LRScheduler", optim.lr_scheduler.LRScheduler),
    "augmentations": Contract((Augmentation,), "a function: crop, label or None, np.random.Generator -> both"),
    "logger": Contract((Logger,), "an object with end(status)", methods=("end",)),
    "scores": Contract(
        (Score,), "an object with add(prediction, label), counts and scores()", methods=("add", "scores")
    ),
}


def builder(group: str, choice: Keys, extra: Iterable[str] = ()) -> Callable[..., Any]:
    """What builds a choice: called with the arguments of its contract, it also gets the choice's own keys.

    `extra`: further arguments that this call gives.
    ValueError, naming the choice: it cannot be imported, or does not take these arguments; when called, it makes
    something else than its contract says.
    """
    contract = CONTRACTS[group]
    kind: type[Any] = type(choice)
    keys = own_keys(group, choice)
    factory = _factory(group, kind)
    parameters = signature(factory).parameters
    requested = {name for name in contract.on_request if name in parameters and name not in keys}
    not_taken = {name for name in contract.optional if not takes_argument(factory, name)}
    unwanted = {*contract.on_request} - requested | not_taken
    names = [name for name in contract.bases[0].called_with if name not in unwanted]
    named = [*names[1:], *keys, *extra, *requested]
    _check_arguments(factory, names[:1], named, _choice_text(group, kind), _untyped_hint(kind, parameters))
    for method in contract.methods:
        if isinstance(factory, type) and not hasattr(factory, method):
            raise ValueError(f"{_choice_text(group, kind)}, which has no {method}(): expected {contract.gives}")

    def build(*positional: Any, **arguments: Any) -> Any:
        wanted = {name: value for name, value in arguments.items() if name not in unwanted}
        product = factory(*positional, **{**keys, **wanted})
        if not isinstance(product, contract.product):
            product_name = type(product).__name__
            raise ValueError(f"{_choice_text(group, kind)}, which makes a {product_name}: expected {contract.gives}")
        _CLASSES_MADE[type(product)] = f"{group}={kind.name}"
        return product

    return build


def _untyped_hint(kind: type[Any], parameters: Iterable[str]) -> str:
    """The end of a message about missing arguments, if a choice's class has one of them without a type."""
    names = [name for name in parameters if name in vars(kind) and name not in kind.__annotations__]
    if not names:
        return ""
    value = vars(kind)[names[0]]
    keyed = f"{names[0]}: {type(value).__name__} = {value!r}"
    return f". {kind.__name__}.{names[0]} has no type, so it is no key: write {keyed}"


def _check_arguments(factory: Any, positional: list[str], named: list[str], choice_text: str, hint: str) -> None:
    """ValueError from `choice_text` to `hint`: what builds the choice does not take these arguments."""
    has_no_constructor = getattr(factory, "__init__", None) is nn.Module.__init__  # which refuses what it seems to take
    try:
        (Signature() if has_no_constructor else signature(factory)).bind(*positional, **dict.fromkeys(named))
    except TypeError as error:
        arguments = ", ".join([*positional, *(f"{name}=" for name in named)])
        raise ValueError(f"{choice_text}, which must take ({arguments}): {error}{hint}") from error


def check_choices(config: TrainingRun) -> None:
    """Raise ValueError, naming the choice, if one of a run cannot be built as its contract says. Nothing is built."""
    for group, choice in _choices_of(config):
        builder(group, choice)
    problem = batch_problem(config)
    if config.trainer.capture is True and problem:
        raise ValueError(f"trainer.capture=true: {problem}; {CAPTURE_ADVICE}")


def _choices_of(config: TrainingRun) -> Iterator[tuple[str, Any]]:
    """Each choice of a run that something is built of, with its group."""
    for group in CONTRACTS.keys() & groups_of(type(config)).keys():
        for _, choice in chosen(group, getattr(config, group)):
            yield group, choice


def batch_problem(config: TrainingRun) -> str | None:
    """Why CUDA graphs do not fit the loss of a run: it asks for each micro-batch. None if it does not."""
    if not isinstance(config, SegmentationRun):
        return None
    forward = getattr(imported("loss", type(config.loss)), "forward", None)
    if forward is None or "batch" not in signature(forward).parameters:  # of a function's result, `loop.train` sees it
        return None
    return f"loss={config.loss.name} asks for each batch, and a CUDA graph would give it the first again"


@contextmanager
def parts_named(config: TrainingRun) -> Iterator[None]:
    """Context that puts GROUP=NAME before an error that comes from the user's own choice, or is about it.

    Other errors of a computation end with the user's choices that may have caused them.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        named_error = _error_with_choices(error, config)
        if named_error is None:
            raise
        raise named_error from error


def _error_with_choices(error: BaseException, config: TrainingRun) -> Exception | None:
    """The error with the name of the choice behind it, or with all that may be. None if it needs no other message."""
    if is_out_of_memory(error) and (error.__cause__ is not None or not isinstance(error, MemoryError)):
        return None  # of a device
    kind = type(error).__name__
    message = re.split(rf"\n(?:\w+\.)*{kind}: ", str(error))[-1].strip()  # of a data worker, after its traceback
    name = _part_behind(error, message, config)
    if name is None:
        return _error_with_suspects(error, message, _suspects(error, config))
    if name in message.rpartition("\n")[2]:
        return None
    reason = message if isinstance(error, ValueError) else f"{kind}: {message}"
    ending = f"\nThis comes from {name}" if "\n" in reason else ""
    named_kind = type(error) if isinstance(error, (MemoryError, ConnectionError)) else ValueError
    return named_kind(f"{name}: {reason}{ending}")


def _error_with_suspects(error: BaseException, message: str, suspects: list[str]) -> Exception | None:
    """An error whose message ends with the choices that may have caused it; None if there are none."""
    if not suspects:
        return None
    ending = f"\nThe cause may be in {' or '.join(suspects)}"
    for kind in (ValueError, FloatingPointError, RuntimeError):
        if isinstance(error, kind):
            return kind(f"{message}{ending}")
    return RuntimeError(f"{type(error).__name__}: {message}{ending}")


def _suspects(error: BaseException, config: TrainingRun) -> list[str]:
    """The choices of one's own, GROUP=NAME, that may have caused an error in code of others."""
    module = _frames(error)[0].f_globals.get("__name__", "")
    is_of_input = isinstance(error, ValueError) and not module.startswith("keepless.")
    if is_of_input or isinstance(error, (OSError, MemoryError, SystemExit, Preempted)):
        return []
    names = {*_names_of_own_choices(config).values()}
    return sorted(name for name in names if not name.startswith(("logger=", "scores=")))


def _part_behind(error: BaseException, message: str, config: TrainingRun) -> str | None:
    """The choice of one's own, GROUP=NAME, whose code is innermost in a traceback, or whose class begins the message.

    If there is neither, the one whose module has the innermost code. A data worker's traceback is in its error's text.
    """
    names = _names_of_own_choices(config)
    names_by_module = {factory.__module__: name for factory, name in names.items()}
    frames = _frames(error)
    files = {module: getattr(sys.modules.get(module), "__file__", None) for module in names_by_module}
    modules = (frame.f_globals.get("__name__") for frame in frames)
    candidates = itertools.chain(
        (names[factory] for frame in frames for factory in names if _is_frame_of(factory, frame)),
        (names[factory] for factory in names if re.match(rf"(the head's )?{factory.__name__}\b", message)),
        (names_by_module[module] for module in modules if module in names_by_module),
        (names_by_module[module] for module, file in files.items() if f'File "{file}"' in str(error)),
    )
    return next(candidates, None)


def _names_of_own_choices(config: TrainingRun) -> dict[Any, str]:
    """GROUP=NAME of each choice that is not ours, by its class or function, and by the class that this has made."""
    choices = [
        (group, choice) for group, choice in _choices_of(config) if not type(choice).__module__.startswith(_OURS)
    ]
    names = {_factory(group, type(choice)): f"{group}={choice.name}" for group, choice in choices}
    names |= {kind: name for kind, name in _CLASSES_MADE.items() if name in names.values()}
    return {factory: name for factory, name in names.items() if _belongs_to_one_choice(factory)}


def _belongs_to_one_choice(factory: Any) -> bool:
    """Whether only one choice of a run uses a class or function.

    Several parts may use our code or a module of PyTorch's, such as nn.Sequential. But a run has one optimiser and one
    schedule.
    """
    if isinstance(factory, type) and issubclass(factory, (optim.Optimizer, optim.lr_scheduler.LRScheduler)):
        return True
    return hasattr(factory, "__name__") and not f"{factory.__module__}.".startswith(_OURS)


def _frames(error: BaseException) -> list[FrameType]:
    """The frames of an error's traceback, innermost first. Frames of its causes come before them."""
    causes = [] if error.__cause__ is None else _frames(error.__cause__)
    return [*causes, *reversed([frame for frame, _ in traceback.walk_tb(error.__traceback__)])]


def _is_frame_of(factory: Any, frame: FrameType) -> bool:
    """Whether a frame runs a function, or a method or function whose first argument is an object of a class."""
    if isinstance(factory, type):
        first_argument = next(iter(frame.f_locals.values()), None)
        return isinstance(first_argument, factory)
    return frame.f_code is getattr(factory, "__code__", "")


def _factory(group: str, kind: type[Any]) -> Any:
    """The class or function that builds choices of a kind. ValueError: see `imported`."""
    built = imported(group, kind)
    return built.make if isinstance(built, Row) else built


def imported(group: str, kind: type[Any]) -> Any:
    """What the class attribute `builds` of a choice is or names. ValueError, naming the choice: no such name."""
    if not isinstance(kind.builds, str):
        return kind.builds
    module, _, name = kind.builds.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        advice = hidden_library(error)
        raise ValueError(f"{_choice_text(group, kind)}, which cannot be imported: {error}{advice}") from error


def own_keys(group: str, choice: Keys) -> dict[str, Any]:
    """Arguments that a choice hands on: its own keys, without its group's, and what `more` adds."""
    shared = {entry.name for base in CONTRACTS[group].bases for entry in fields(base)}
    arguments = {
        entry.name: getattr(choice, entry.name)
        for entry in fields(choice)
        if entry.name not in shared and entry.metadata.get("is_argument", True)
    }
    if group == "data" and arguments:
        arguments["keys"] = "data."  # their prefix in messages
    return arguments | getattr(choice, "more", dict)()  # which may also replace values


def takes_argument(factory: Callable[..., Any], name: str) -> bool:
    """Whether a function or class takes an argument of this name."""
    parameters = signature(factory).parameters
    return name in parameters or any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters.values())


def _choice_text(group: str, kind: type[Any]) -> str:
    builds = kind.builds.make if isinstance(kind.builds, Row) else kind.builds
    place = builds if isinstance(builds, str) else f"{builds.__module__}.{getattr(builds, '__qualname__', builds)}"
    return f"{group}={kind.name} builds {place}"
