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
from engine.process.distributed import launcher
from engine.process.stopping import Preempted
from engine.schema.evaluation import NETWORK
from engine.schema.keys import CHOICES, chosen, groups_of
from engine.schema.training import TrainingRun
from models.private_torch import tree_leaves

# The groups whose choices compute what is compared of a step.
COMPUTED_BY = {"draws": ("sampler",), "crops": ("augmentations",), "outputs": NETWORK, "loss": ("loss",)}
COMPUTED_BY |= {"gradients": ("loss", *NETWORK), "learning rates": ("lr_schedule",), "weights": ("optim",)}
Checksums = dict[tuple[int, str], int]  # by step and by what is compared, in the order of their computation


class Watch:
    """Follows a training on few images: notes checksums of each step, and may stop it after the step `stop`."""

    def __init__(self, steps: int, stop: int = 0):
        self.steps = steps
        self.stop = stop
        self.step = 0
        self.checksums: Checksums = {}

    def first_images(self, split: Any, crops: int) -> Any:
        """The first images of a split, for half of the steps: so the run has two epochs, or more."""
        return split.first(max(1, self.steps // 2) * crops)

    def follow_run(self, run: Any, loss: Any) -> None:
        """Note from now on what a run (`engine.training.run.Run`) computes, and stop it within an epoch.

        (An epoch of a single step has nothing within it.)
        """
        self.run = run
        steps_per_epoch = run.schedule.steps_per_epoch
        if steps_per_epoch > 1 and self.stop % steps_per_epoch == 0:
            self.stop -= 1
        learner = run.learner
        learner.network.register_forward_hook(lambda network, _, outputs: self.add_checksum("outputs", outputs))
        if isinstance(loss, nn.Module):
            loss.register_forward_hook(lambda module, _, value: self.add_checksum("loss", value))
        learner.optimizer.register_step_pre_hook(
            lambda *_: self.add_checksum("gradients", [parameter.grad for parameter in learner.parameters])
        )
        learner.optimizer.register_step_post_hook(lambda *_: self.add_checksum("weights", learner.parameters))

    def note_step(self, step: int, draws: Sequence[Any], minibatch: dict) -> None:
        """Note what a step takes; ask the run to stop after it if it is the last."""
        self.step = step
        if step == self.stop:
            self.run.stop.requested = True
        self.add_checksum("draws", draws)
        self.add_checksum("crops", [minibatch["image"], minibatch["label"]])
        self.add_checksum("learning rates", [float(group["lr"]) for group in self.run.learner.optimizer.param_groups])

    def add_checksum(self, kind: str, values: Any) -> None:
        """Add values to a checksum of this step."""
        self.checksums[self.step, kind] = _checksum(values, self.checksums.get((self.step, kind), 0))


def check(config: TrainingRun) -> None:
    """Train for `trainer.resume_check` steps whole, and stopped and continued; compare all that the checkpoints hold.

    Each training has a fresh interpreter and a temporary run directory. If all is equal, that is printed, and a mark is
    kept by which later trainings with these plugins know it. ValueError: they differ, and which part first.
    """
    if launcher():
        raise ValueError(f"debug=resume is for one process: start {config.entry}.py by python, without torchrun")
    steps = config.trainer.resume_check
    with tempfile.TemporaryDirectory(prefix="resume-") as folder:
        train = partial(run_in_fresh_interpreter, _train_for_checksums, plain(config), type(config), plugins.words())
        whole, state = train(f"{folder}/whole", Watch(steps))
        before_stop, _ = train(f"{folder}/stopped", Watch(steps, stop=max(1, steps * 3 // 4)))
        after_stop, continued_state = train(f"{folder}/stopped", Watch(steps))
        stop_text = f"if a run is stopped after step {max(step for step, _ in before_stop)} and continued"
        parts = [part for part in state if state[part] != continued_state.get(part)]
        if parts:
            again, _ = train(f"{folder}/again", Watch(steps))
            first_of_again = _first_difference(whole, again, config)
            first = _first_difference(whole, before_stop | after_stop, config)
            raise ValueError(_difference_text(parts, first_of_again, first, stop_text))
    if plugins.LOADED:
        mark = _mark_of_passing(config)
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
    limits = f"(What begins after step {steps}, or is in no checkpoint, such as a logger's count, was not compared.)"
    make_console().print(f"debug=resume: all is equal after {steps} steps, also {stop_text}. {limits}", soft_wrap=True)


def _difference_text(parts: list[str], first_of_again: str, first: str, stop_text: str) -> str:
    """The message about parts of the checkpoints that differ.

    `first_of_again`: the first difference of two whole runs, and `first` of a stopped one; empty if there is none.
    """
    text = f"debug=resume: {', '.join(parts[:3])} differ"
    if first_of_again:
        cure = "trainer.deterministic=true makes GPUs repeat a run; parts draw from their generator, losses by torch"
        return f"{text}, but two whole runs differ already: {first_of_again}. {cure}"
    if "augmentations=" in first:
        cure = "Data workers run it, and their states are lost: let it compute from step, epoch, place and rng"
    else:
        cure = "What a part keeps needs state_dict and load_state_dict, or in a network a buffer: docs/extending.md"
    return f"{text} {stop_text}: {first or parts[0]}. {cure}"


def has_passed(config: TrainingRun) -> bool:
    """Whether `check` has passed with these choices and plugins, or there are no plugins."""
    return not plugins.LOADED or _mark_of_passing(config).exists()


def _mark_of_passing(config: TrainingRun) -> Path:
    """The file that `check` leaves where it passes."""
    choices = _choices(config, *groups_of(type(config)))
    digest = sha256(repr((choices, plugins.hashes())).encode()).hexdigest()
    return (cache_folder() or Path(tempfile.gettempdir())) / "resumed" / digest


def run_in_fresh_interpreter(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a fork of a fresh interpreter; return its result. (A fork of our process has no gradients.)"""
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__])  # imported once for all
    with ProcessPoolExecutor(1, context) as process:
        return process.submit(function, *arguments).result()


def _train_for_checksums(
    values: dict, schema: type[TrainingRun], words: list[str], run_dir: str, watch: Watch
) -> tuple[Checksums, dict[str, int]]:
    """Train in silence; return checksums of the steps, and of the checkpoint's parts. ValueError: it fails."""
    plugins.load(words, CHOICES)
    config = from_plain(values, schema)
    config.run_dir = run_dir
    config.resume = "auto"
    trainer = config.trainer
    trainer.steps = watch.steps
    trainer.checkpoint_every_steps = max(1, watch.steps // 3)
    trainer.epochs = trainer.evaluate_every_steps = trainer.evaluate_every_epochs = trainer.patience = None
    try:
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()), suppress(Preempted):
            import_module(config.entry).train(config, "debug=resume", watch)
    except Exception as error:
        raise ValueError(f"debug=resume: a training fails: {error}") from error
    state = checkpoint.load(Path(run_dir) / "checkpoints" / "last.pt")
    state |= {"config": None, "parts": state["parts"][0]}
    parts = {name: part if isinstance(part, dict) else {"": part} for name, part in state.items()}
    return watch.checksums, {
        f"{name} {key}".strip(): _checksum(value) for name, part in parts.items() for key, value in part.items()
    }


def _first_difference(whole: Checksums, other: Checksums, config: TrainingRun) -> str:
    """What differs first of two runs, and the choices that compute it; empty if nothing does."""
    for (step, kind), checksum in whole.items():
        if other.get((step, kind)) != checksum:
            choices = _choices(config, *COMPUTED_BY[kind]) or [f"data={config.data.name}"]
            return f"first the {kind} of step {step}, of {' and '.join(choices)}"
    return ""


def _choices(config: TrainingRun, *groups: str) -> list[str]:
    """The choices of groups, each GROUP=NAME."""
    pairs = [pair for group in groups for pair in chosen(group, getattr(config, group, {}))]
    return [f"{key.partition('.')[0]}={choice.name}" for key, choice in pairs]


def _checksum(values: Any, total: int = 0) -> int:
    """A checksum of tensors and other values, continued from `total`."""
    for leaf in tree_leaves(values):
        if isinstance(leaf, Tensor):
            total = zlib.crc32(leaf.detach().cpu().contiguous().reshape(-1).view(uint8).numpy().tobytes(), total)
        else:
            total = zlib.crc32(repr(leaf).encode(), total)
    return total
