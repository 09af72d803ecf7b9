"""Lines of text that describe what a configuration builds.

The entries' real code runs. Whatever would compute, write files or wait is replaced by recorders.
"""

import importlib
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from engine import assemble
from engine.configuration import config as configuration
from engine.prediction import opening
from engine.process.distributed import World
from engine.records.evaluated import Evaluated
from engine.schema.evaluation import Evaluation, Prediction
from engine.schema.keys import refuse_other_tasks
from engine.schema.training import TrainingRun
from engine.training import build, loop, planner, preparation
from engine.training.learner import Learner
from engine.training.run import Run
from models import recomputation
from models.forward import Forward

OURS = ("datasets.", "engine.", "keepless.", "models.", "tests.")
FEW = 8  # entries of a list or tensor that are shown


class Stub(nn.Module):
    """A network with a part for each role, to be trained instead of the configuration's."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8))
        self.head, self.cls, self.classifier = (nn.Linear(8, 8) for _ in range(3))


class Package(nn.Module):
    """Stands for the released layer, which may not be installed."""

    def __init__(self, channels: int, **options: Any) -> None:
        super().__init__()
        self.channels = channels
        self.options = str(options)


def described(thing: Any, place: str = "") -> Iterator[str]:
    """Lines "place=value" of all numbers and texts in a thing that is ours."""
    for kinds, of_kind in KINDS:
        if isinstance(thing, kinds):
            yield from of_kind(thing, place)
            return
    if callable(thing) and hasattr(thing, "__qualname__"):
        yield f"{place}={thing.__qualname__}"
        return
    yield f"{place}={type(thing).__name__}"
    if f"{type(thing).__module__}.".startswith(OURS):
        parts = thing._asdict() if hasattr(thing, "_asdict") else getattr(thing, "__dict__", {})
        yield from described({key: value for key, value in parts.items() if not key.startswith("_")}, place)


def _of_tensor(tensor: Tensor, place: str) -> Iterator[str]:
    few = tensor.numel() <= FEW and tensor.device.type == "cpu"
    yield f"{place}={tensor.dtype}{list(tensor.shape)}{tensor.tolist() if few else ''}"


def _of_optimizer(optimizer: Optimizer, place: str) -> Iterator[str]:
    yield f"{place}={type(optimizer).__name__}"
    for group in optimizer.param_groups:
        yield f"{place}.group={group | {'params': [tuple(parameter.shape) for parameter in group['params']]}}"


def _of_rates(scheduler: LRScheduler, place: str) -> Iterator[str]:
    """The first learning rate in the first 40 steps."""
    rates = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the optimiser does not step
        for _ in range(40):
            rates.append(f"{scheduler.get_last_lr()[0]:.4g}")
            scheduler.step()
    yield f"{place}={rates}"


def _of_module(network: nn.Module, place: str) -> Iterator[str]:
    """Every module with its options, and which of its parameters are trained."""
    for name, module in network.named_modules():
        kind = type(module)
        part = f"{place}.{name.partition('.')[0]}: {kind.__name__}"
        yield f"{part}({module.extra_repr()})"
        for key, value in vars(module).items():
            is_ours = f"{kind.__module__}.".startswith(OURS) or key in ("stays_in_evaluation", "transforms")
            if is_ours and not key.startswith("_") and isinstance(value, (bool, int, float, str, tuple, list, dict)):
                yield from described(value, f"{part}.{key}")
        for key, value in module._parameters.items():
            yield f"{part}.{key}={None if value is None else (tuple(value.shape), value.requires_grad)}"


def _of_loader(loader: DataLoader, place: str) -> Iterator[str]:
    parts = ("dataset", "batch_sampler", "sampler", "batch_size", "num_workers", "pin_memory", "collate_fn")
    arguments = {part: getattr(loader, part) for part in parts if not (part == "sampler" and loader.batch_size is None)}
    yield from described(arguments, place)
    keys = next(iter(loader.batch_sampler))
    items = loader.dataset
    read = items.__getitems__(keys) if hasattr(items, "__getitems__") else items[keys[0]]
    yield from described(read, f"{place}.item")


def _of_list(things: list | tuple, place: str) -> Iterator[str]:
    if hasattr(things, "_asdict"):
        yield from described(things._asdict(), place)
    elif all(isinstance(thing, (int, float, str, type(None))) for thing in things):
        yield f"{place}={things[:FEW]}/{len(things)}"
    else:
        for thing in things[:FEW]:
            yield from described(thing, place)


def _of_dict(things: dict, place: str) -> Iterator[str]:
    for key, value in things.items():
        yield from described(value, f"{place}.{key}")


TEXTS = (bool, int, float, str, Path, range, type(None), torch.dtype, torch.device, torch.memory_format)
KINDS: tuple[tuple[Any, Callable[[Any, str], Iterator[str]]], ...] = (
    (TEXTS, lambda thing, place: iter([f"{place}={thing}"])),
    (Tensor, _of_tensor),
    (np.ndarray, lambda array, place: iter([f"{place}={array.dtype}{list(array.shape)}"])),
    (Optimizer, _of_optimizer),
    (LRScheduler, _of_rates),
    (torch.amp.GradScaler, lambda scaler, place: iter([f"{place}={scaler.is_enabled()}"])),
    (nn.Module, _of_module),
    (DataLoader, _of_loader),
    (partial, lambda call, place: described([call.func, *call.args, call.keywords], place)),
    ((list, tuple), _of_list),
    (dict, _of_dict),
)


@contextmanager
def left_out(note: Callable[..., Any]) -> Iterator[pytest.MonkeyPatch]:
    """Context without whatever computes, writes files or waits for other processes; `note(place, *things)` is told."""

    @contextmanager
    def context(place: str, result: Any, *arguments: Any, **named: Any) -> Iterator[Any]:
        note(place, *arguments, named)
        yield result

    compiler = torch.backends.cudnn.benchmark
    flags = torch.are_deterministic_algorithms_enabled()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        patch.setattr(configuration, "typed", lambda values, _: values)
        for module in (preparation, importlib.import_module("eval")):
            patch.setattr(module, "joined", partial(context, "joined", World()))
            patch.setattr(module, "reading_errors", partial(context, "reading", None))
            patch.setattr(module, "verify_with_progress", lambda *_: note("verified", True) or [])
            patch.setattr(module, "log_to", lambda *_: None)
            patch.setattr(module, "make_console", lambda *_: Console(quiet=True))
        patch.setattr(recomputation, "recompute_activations", lambda network, **o: setattr(network, "recomputes", o))
        patch.setattr("models.released_norm.released_abn", lambda: Package)
        patch.setattr(torch, "compile", lambda module, **_: nn.Sequential(module))
        patch.setattr(build, "check_compiler", lambda *_, **__: None)
        try:
            yield patch
        finally:
            torch.backends.cudnn.benchmark = compiler
            torch.use_deterministic_algorithms(flags)
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False


class Directory:
    """A run directory without files."""

    notice = resumed = ""

    def __init__(self, path: Path, note: Callable[..., Any]):
        self.path = path
        self.log = path
        self.config = path
        note("directory", path)

    def in_use(self) -> Any:
        return nullcontext()

    def lock(self) -> None: ...

    def checkpoint_to_resume(self, config: TrainingRun, *_: Any) -> None: ...


_networks: dict[str, list[str]] = {}  # lines, by all keys that `network_of` may read


def started(note: Callable[..., Any], run: Run, eager: str = "") -> None:
    """Instead of `Run.start`: the network on no device, and a learner of a stub."""
    config = run.config
    classes = len(run.train_set.classes)
    key = str(
        (config.task, config.norm, config.body, getattr(config, "head", ""), config.trainer, config.memory, classes)
    )
    if key not in _networks:
        with torch.device("meta"):
            _networks[key] = [*described(build.network_of(config, classes), "network")]
    note("network", *_networks[key])
    with patch.object(build, "network_of", lambda *_: Stub()):
        run.learner = build.learner(run.config, classes, run.schedule, run.world, eager)
    note("seed", torch.initial_seed())
    on_cuda = World(device=torch.device("cuda"))
    note("eager on CUDA", build.why_eager(run.config, Stub(), 100, on_cuda))
    learner: Learner = run.learner
    note("learner", {**vars(learner), "network": None, "forward": _of_forward(learner.forward)})
    note("schedule", run.schedule)
    modes = {
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        **{name: getattr(torch.backends.cudnn, name) for name in ("allow_tf32", "benchmark")},
    }
    note("arithmetic", modes, torch.backends.cuda.matmul.allow_tf32)
    memory = run.config.memory
    note("memory", None if memory.budget is None else memory.available(memory.gpus or 1))


def _of_forward(forward: Forward) -> dict:
    return {**vars(forward), "network": type(forward.network).__name__, "autocast": forward.autocast.keywords} | {
        "type": forward.autocast.args
    }


def _note(lines: Counter[str], place: str, *things: Any) -> None:
    for thing in things:
        lines.update(described(thing, place))


def of_training(config: TrainingRun) -> Counter[str]:
    """Lines about the training and its evaluations that train_seg.py or train_imagenet.py would run."""
    lines = Counter[str]()
    note = partial(_note, lines)
    entry: Any = importlib.import_module(config.entry)
    with left_out(note) as patch:
        patch.setattr(planner, "fit_to_budget", lambda config: (config, ""))
        patch.setattr(preparation, "RunDirectory", lambda path: Directory(Path(path), note))
        patch.setattr(preparation, "new_run_path", lambda *_: "new")
        for name in ("check_exists", "write_file", "keep_freed_memory"):
            patch.setattr(preparation, name, lambda *_: None)
        patch.setattr(configuration, "yaml", lambda _: "")
        patch.setattr(Run, "start", lambda run, *arguments: started(note, run, *arguments))
        patch.setattr(Run, "conclude", lambda run, _: {})

        def train(run: Run, minibatches: DataLoader, loss: Any, evaluate: partial) -> None:
            note("splits", run.train_set, run.val_set)
            note("minibatches", minibatches)
            note("loss", *getattr(loss, "losses", {"": loss}).values())
            note("evaluate", *evaluate.args[1:])

        patch.setattr(loop, "train", train)
        entry.train(config)
    return lines


def of_evaluation(options: Evaluation | Prediction, config: TrainingRun) -> Counter[str]:
    """Lines about what eval.py or scripts.predict would run on a checkpoint of this training."""
    lines = Counter[str]()
    note = partial(_note, lines)

    def forward(trained: TrainingRun, *arguments: Any) -> Forward:
        note("config", configuration.flat(configuration.plain(trained)))
        note("forward", arguments[-2], arguments[-1])
        return assemble.forward(trained, Stub(), torch.device("cpu"))

    state = {"classes": ["a", "b", "c"], "palette": [[n, n, n] for n in range(3)], "step": 1, "ema": {}, "network": {}}
    entry: Any = importlib.import_module("eval")
    with left_out(note) as patch:
        for module in (entry, opening):
            patch.setattr(module, "trained_forward", forward)
            patch.setattr(module, "load_checkpoint", lambda options: _checkpoint(options, state, config))
        patch.setattr(opening, "to_standard", lambda network, **_: network)
        patch.setattr(opening, "device_of", lambda device: note("device", device) or torch.device("cpu"))
        if isinstance(options, Prediction):
            network = opening.open_checkpoint("net.pt", options).network
            parts = {name: part for name, part in vars(network).items() if name not in vars(nn.Module())}
            parts |= {"_forward": _of_forward(network.forward_pass), "view": getattr(network, "view", None)}
            note("predictor", parts)
            return lines
        evaluated = Evaluated({}, "", 0)
        for name in ("segmentation.evaluation", "classification.accuracy"):
            name = f"engine.{name}.evaluate_split"
            patch.setattr(name, lambda _, *arguments, **options: note("evaluated", *arguments, options) or evaluated)
        files = "engine.segmentation.evaluation.written_predictions"
        patch.setattr(files, lambda _, world, *arguments: note("files", arguments) or nullcontext())
        patch.setattr(entry, "writable_file", lambda *_, **__: None)
        patch.setattr(entry, "write_results", lambda file, *_, **__: note("file", file) or {})
        patch.setattr(entry, "print_results", lambda *_: None)
        entry.evaluate(options)
    return lines


def _checkpoint(options: Any, state: dict, config: TrainingRun) -> tuple[Path, dict, TrainingRun]:
    refuse_other_tasks(options, config.task, "it")
    return Path("run/checkpoints/last.pt"), state, config
