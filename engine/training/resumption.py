"""debug=resume: does a run that was stopped and continued equal a whole one? If not, which part differs first?"""

import tempfile
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stderr, redirect_stdout, suppress
from functools import partial
from hashlib import sha256
from importlib import import_module
from io import StringIO
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from torch import Tensor, nn, uint8

from datasets.cache import cache_folder
from engine.checkpoint import files as checkpoint
from engine.checkpoint.recorded import from_plain
from engine.configuration.config import plain
from engine.process import plugins
from engine.process.console import make_console
from engine.process.distributed import launched
from engine.process.stopping import Preempted
from engine.schema.keys import CHOICES, chosen, groups_of
from engine.schema.training import TrainingRun
from models.private_torch import tree_leaves

NETWORK = ("norm", "body", "head")
# The groups whose choices compute what is compared of a step.
MADE_BY = {"draws": ("sampler",), "crops": ("augmentations",), "outputs": NETWORK, "loss": ("loss",)}
MADE_BY |= {"gradients": ("loss", *NETWORK), "learning rates": ("lr_schedule",), "weights": ("optim",)}
Sums = dict[tuple[int, str], int]  # checksums, by step and by what is compared, in the order of their computation


class Watch:
    """Follows a training of few images: notes checksums of each step, and perhaps stops it after the step `stop`."""

    def __init__(self, steps: int, stop: int = 0):
        self.steps, self.stop, self.step, self.sums = steps, stop, 0, Sums()

    def few(self, split: Any, crops: int) -> Any:
        """The first images, of half of the steps: so the run has two epochs, or more."""
        return split.first(max(1, self.steps // 2) * crops)

    def begin(self, run: Any, loss: Any) -> None:
        """Note what a run (`engine.training.run.Run`) computes. It is stopped within an epoch, if that has steps."""
        self.run, parameters, epoch = run, run.learner.parameters, run.schedule.epoch
        self.stop -= epoch(self.stop).is_integer() and not epoch(1).is_integer()
        run.learner.network.register_forward_hook(lambda network, _, outputs: self.note("outputs", outputs))
        if isinstance(loss, nn.Module):
            loss.register_forward_hook(lambda module, _, value: self.note("loss", value))
        optimizer = run.learner.optimizer
        optimizer.register_step_pre_hook(lambda *_: self.note("gradients", [weight.grad for weight in parameters]))
        optimizer.register_step_post_hook(lambda *_: self.note("weights", parameters))

    def look(self, step: int, draws: Sequence[Any], minibatch: dict) -> None:
        """Note what a step takes; ask the run to stop after it if it is the last."""
        self.step, self.run.stop.requested = step, self.run.stop.requested or step == self.stop
        self.note("draws", draws)
        self.note("crops", [minibatch["image"], minibatch["label"]])
        self.note("learning rates", [float(group["lr"]) for group in self.run.learner.optimizer.param_groups])

    def note(self, what: str, values: Any) -> None:
        self.sums[self.step, what] = _sum(values, self.sums.get((self.step, what), 0))


def train_or_check(train: Callable[[Any, str], dict | None], config: TrainingRun, command: str) -> dict | None:
    """Train, and return the results; or only `check`, with debug=resume."""
    if not config.trainer.resume_check:
        return train(config, command)
    check(config)
    return None


def check(config: TrainingRun) -> None:
    """Train for `trainer.resume_check` steps whole, and stopped and continued; compare all that the checkpoints hold.

    Each training has a fresh interpreter and a temporary run directory. ValueError: they differ, and which part first.
    """
    if launched():
        raise ValueError(f"debug=resume is for one process: start {config.entry}.py by python, without torchrun")
    steps = config.trainer.resume_check
    with tempfile.TemporaryDirectory(prefix="resume-") as folder:
        train = partial(fresh, _trained, plain(config), type(config), plugins.words())
        whole, state = train(f"{folder}/whole", Watch(steps))
        before, _ = train(f"{folder}/stopped", Watch(steps, max(1, steps * 3 // 4)))
        after, continued = train(f"{folder}/stopped", Watch(steps))
        stopped = f"if a run is stopped after step {max(step for step, _ in before)} and continued"
        if parts := [part for part in state if state[part] != continued.get(part)]:
            differ, first = f"debug=resume: {', '.join(parts[:3])} differ", _first(whole, before | after, config)
            if again := _first(whole, train(f"{folder}/again", Watch(steps))[0], config):
                cure = "trainer.deterministic=true makes GPUs repeat a run; parts draw from generators that they get"
                raise ValueError(f"{differ}, but two whole runs differ already: {again}. {cure}")
            cure = "What a part keeps needs state_dict and load_state_dict: docs/extending.md"
            raise ValueError(f"{differ} {stopped}: {first or parts[0]}. {cure}")
    if (file := record(config)) is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    make_console().print(f"debug=resume: all is equal after {steps} steps, also {stopped}", soft_wrap=True)


def record(config: TrainingRun) -> Path | None:
    """The file that `check` leaves where it passes with these choices and plugins; None without plugins."""
    digest = sha256(repr((_names(config, *groups_of(type(config))), plugins.hashes())).encode()).hexdigest()
    return (cache_folder() or Path(tempfile.gettempdir())) / "resumed" / digest if plugins.LOADED else None


def fresh(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function returns in a fork of a fresh interpreter. (A fork of a process with gradients has none.)"""
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__])  # imported once for all
    with ProcessPoolExecutor(1, context) as process:
        return process.submit(function, *arguments).result()


def _trained(
    values: dict, schema: type[TrainingRun], words: list[str], run_dir: str, watch: Watch
) -> tuple[Sums, dict[str, int]]:
    """Train in silence; return the checksums of the steps, and of the checkpoint's parts. ValueError: it fails."""
    plugins.load(words, CHOICES)
    config = from_plain(values, schema)
    config.run_dir, config.resume, trainer = run_dir, "auto", config.trainer
    trainer.steps, trainer.epochs, trainer.checkpoint_every_steps = watch.steps, None, max(1, watch.steps // 3)
    trainer.evaluate_every_steps = trainer.evaluate_every_epochs = trainer.patience = None
    try:
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()), suppress(Preempted):
            import_module(config.entry).train(config, "debug=resume", watch)
    except Exception as error:
        raise ValueError(f"debug=resume: a training fails: {error}") from error
    state = checkpoint.load(Path(run_dir) / "checkpoints" / "last.pt")
    state |= {"config": None, "parts": state["parts"][0]}
    parts = {name: part if isinstance(part, dict) else {"": part} for name, part in state.items()}
    return watch.sums, {f"{a} {b}".strip(): _sum(value) for a, part in parts.items() for b, value in part.items()}


def _first(whole: Sums, other: Sums, config: TrainingRun) -> str:
    """What differs first of two runs, and the choices that compute it; empty if nothing does."""
    for (step, what), total in whole.items():
        if other.get((step, what)) != total:
            names = _names(config, *MADE_BY[what]) or [f"data={config.data.name}"]
            return f"first the {what} of step {step}, of {' and '.join(names)}"
    return ""


def _names(config: TrainingRun, *groups: str) -> list[str]:
    """The choices of groups, each GROUP=NAME."""
    pairs = [pair for group in groups for pair in chosen(group, getattr(config, group, {}))]
    return [f"{key.partition('.')[0]}={choice.name}" for key, choice in pairs]


def _sum(values: Any, total: int = 0) -> int:
    """A checksum of tensors and other values."""
    for leaf in tree_leaves(values):
        is_tensor = isinstance(leaf, Tensor)
        content = leaf.detach().cpu().contiguous().reshape(-1).view(uint8).numpy() if is_tensor else repr(leaf).encode()
        total = zlib.crc32(content, total)
    return total
