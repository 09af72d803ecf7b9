"""debug=resume: does a run that was stopped and continued equal a whole one? If not, which part differs first?"""

from engine.process.start import die_with_parent

import copy
import json
import os
import signal
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from hashlib import sha256
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from torch import Tensor, nn, uint8

from datasets.cache import cache_folder
from engine.checkpoint import files as checkpoint
from engine.process import plugins
from engine.process.console import make_console
from engine.process.distributed import launched
from engine.process.stopping import Preempted, errors_for_users
from engine.schema.keys import chosen, groups_of
from engine.schema.training import TrainingRun
from keepless.torch_internals import tree_leaves

NETWORK = ("norm", "body", "head")
# What is compared of a step, in the order in which it is computed, and the groups whose choices compute it.
MADE_BY = {"draws": ("sampler",), "crops": ("augmentations",), "outputs": NETWORK, "loss": ("loss",)}
MADE_BY |= {"gradients": ("loss", *NETWORK), "learning rates": ("lr_schedule",), "weights": ("optim",)}
Sums = dict[str, dict[str, int]]  # checksums, by step and by what is compared


class Watch:
    """Follows a training of few images: checksums of each step, and perhaps a stop after the step `stop`."""

    def __init__(self, steps: int, stop: int = 0):
        self.steps, self.stop, self.step, self.sums = steps, stop, 0, Sums()

    def few(self, split: Any, crops: int) -> Any:
        """The first images, of half of the steps: so the run has two epochs, or more."""
        return split.first(max(1, self.steps // 2) * crops)

    def followed(self, run: Any, minibatches: Iterable[dict], loss: Any) -> Iterator[dict]:
        """The minibatches of a run (`engine.training.run.Run`), which is stopped within an epoch, as by a scheduler."""
        note, parameters, optimizer, epoch = (
            self._note,
            run.learner.parameters,
            run.learner.optimizer,
            run.schedule.epoch,
        )
        stop = self.stop - (epoch(self.stop).is_integer() and not epoch(1).is_integer())
        run.learner.network.register_forward_hook(lambda own, _, out: note("outputs", out) if own.training else None)
        if isinstance(loss, nn.Module):
            loss.register_forward_hook(lambda *given: note("loss", given[-1]))
        optimizer.register_step_pre_hook(lambda *_: note("gradients", [each.grad for each in parameters]))
        optimizer.register_step_post_hook(lambda *_: note("weights", parameters))
        for self.step, minibatch in enumerate(minibatches, start=run.start_step + 1):
            if self.step == stop:
                os.kill(os.getpid(), signal.SIGTERM)
            note("draws", run.draws.noted[0][0])
            note("crops", [minibatch["image"], minibatch["label"]])
            note("learning rates", [float(group["lr"]) for group in optimizer.param_groups])
            yield minibatch

    def _note(self, what: str, things: Any) -> None:
        of_step = self.sums.setdefault(str(self.step), {})
        of_step[what] = _sum(things, of_step.get(what, 0))


def check(train: Callable[[Any, str, Watch], object], config: TrainingRun) -> None:
    """Train for `trainer.resume_check` steps whole, and stopped and continued; compare all that the checkpoints hold.

    Each is a process of its own with a temporary run directory. ValueError: they differ, and which part is the first.
    """
    if launched():
        raise ValueError(f"debug=resume is for one process: start {config.entry}.py by python, without torchrun")
    steps = config.trainer.resume_check
    with tempfile.TemporaryDirectory(prefix="resume-") as name:
        folder = Path(name)
        whole, sums = _trained(train, config, folder / "whole", Watch(steps))
        before, _ = _trained(train, config, folder / "stopped", Watch(steps, max(1, steps * 3 // 4)))
        after, continued = _trained(train, config, folder / "stopped", Watch(steps))
        if other := [name for name in sums if sums[name] != continued.get(name)]:
            stopped = f"if a run is stopped after step {len(before)} and continued"
            said, first = (
                f"debug=resume: {', '.join(other[:3])} differ",
                _first(whole, before | after, config) or other[0],
            )
            if again := _first(whole, _trained(train, config, folder / "again", Watch(steps))[0], config):
                cure = (
                    "trainer.deterministic=true makes GPUs repeat a run; parts draw from the generators they are given"
                )
                raise ValueError(f"{said}, but two whole runs differ already: {again}. {cure}")
            raise ValueError(
                f"{said} {stopped}: {first}. What a part keeps needs state_dict and load_state_dict: docs/extending.md"
            )
    if (file := record(config)) is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    said = f"all is equal after {steps} steps, also if a run is stopped after step {len(before)} and continued"
    make_console().print(f"debug=resume: {said}", soft_wrap=True)


def record(config: TrainingRun) -> Path | None:
    """The file that `check` leaves where it passes with these choices and plugins; None without plugins."""
    names = [
        f"{key}={one.name}" for group in groups_of(type(config)) for key, one in chosen(group, getattr(config, group))
    ]
    digest = sha256(repr((names, plugins.hashes())).encode()).hexdigest()
    return (cache_folder() or Path(tempfile.gettempdir())) / "resumed" / digest if plugins.LOADED else None


def _first(whole: Sums, other: Sums, config: TrainingRun) -> str:
    """What differs first of two runs, and the choices that compute it; empty if nothing does."""
    for step, own in whole.items():
        for what in (what for what in MADE_BY if own.get(what) != other.get(step, {}).get(what)):
            pairs = [pair for group in MADE_BY[what] for pair in chosen(group, getattr(config, group, {}))]
            names = [f"{key.partition('.')[0]}={one.name}" for key, one in pairs] or [f"data={config.data.name}"]
            return f"the {what} of step {step} are the first, of {' and '.join(names)}"
    return ""


def _sum(things: Any, total: int = 0) -> int:
    """A checksum of tensors and other values."""
    for leaf in tree_leaves(things):
        is_tensor = isinstance(leaf, Tensor)
        own = leaf.detach().cpu().contiguous().reshape(-1).view(uint8).numpy() if is_tensor else repr(leaf).encode()
        total = zlib.crc32(own, total)
    return total


def _trained(
    train: Callable[[Any, str, Watch], object], config: TrainingRun, run_dir: Path, watch: Watch
) -> tuple[Sums, dict[str, int]]:
    """Train in another process; return the checksums of its steps, and of its checkpoint. ValueError: it fails."""
    own, (log, sums) = copy.deepcopy(config), (run_dir.with_suffix(end) for end in (".log", ".json"))
    own.run_dir, own.resume, trainer = str(run_dir), "auto", own.trainer
    trainer.steps, trainer.epochs, trainer.resume_check = watch.steps, None, 0
    trainer.evaluate_every_steps = trainer.evaluate_every_epochs = trainer.patience = None
    trainer.checkpoint_every_steps = max(1, watch.steps // 3)

    def in_process() -> None:
        die_with_parent(signal.SIGTERM)
        sys.stdout = sys.stderr = file = open(log, "w", buffering=1)
        os.dup2(file.fileno(), 2)
        with errors_for_users():
            with suppress(Preempted):
                train(own, "debug=resume", watch)
            sums.write_text(json.dumps(watch.sums))

    process = get_context("fork").Process(target=in_process)
    process.start()
    process.join()
    if process.exitcode:
        _, error, said = log.read_text().strip().rpartition("error: ")
        raise ValueError(f"debug=resume: a training fails: {said if error else said.splitlines()[-1]}")
    state = checkpoint.load(run_dir / "checkpoints" / "last.pt")
    state |= {"config": None, "parts": state["parts"][0]}
    entries = ((part, each if isinstance(each, dict) else {"": each}) for part, each in state.items())
    return json.loads(sums.read_text()), {
        f"{a} {b}".strip(): _sum(each) for a, own in entries for b, each in own.items()
    }
