"""debug=resume: does a run that was stopped and continued equal a whole one? If not, which part differs first?"""

import copy
import json
import os
import signal
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
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
from engine.process.start import die_with_parent
from engine.process.stopping import Preempted, errors_for_users
from engine.schema.training import TrainingRun
from keepless.torch_internals import tree_leaves

# What is compared of a step, in the order in which it is computed, and the groups whose choices compute it.
MADE_BY = {
    "draws": ("sampler",),
    "crops": ("augmentations",),
    "outputs": ("norm", "body", "head"),
    "loss": ("loss",),
    "gradients": ("loss", "norm", "body", "head"),
    "learning rates": ("lr_schedule",),
    "weights": ("optim",),
}
Sums = dict[int, dict[str, int]]  # by step, and by what is compared


class Watch:
    """Follows a training of few images: checksums of each step, and perhaps a stop after the step `stop`."""

    def __init__(self, steps: int, stop: int | None = None):
        self.steps, self.stop, self.step, self.sums = steps, stop, 0, Sums()

    def few(self, split: Any, crops: int) -> Any:
        """The first images, of half of the steps: so the run has two epochs, or more."""
        return split.first(max(1, self.steps // 2) * crops)

    def followed(self, run: Any, minibatches: Iterable[dict], loss: Any) -> Iterator[dict]:
        """The minibatches of a run (`engine.training.run.Run`), which is stopped as a scheduler stops it."""
        learner, note, epoch = run.learner, self._note, run.schedule.steps_per_epoch
        optimizer, stop = learner.optimizer, self.stop
        stop = stop and stop - int(epoch > 1 and stop % epoch == 0)  # within an epoch
        learner.network.register_forward_hook(lambda *given: note("outputs", given[-1]))
        if isinstance(loss, nn.Module):
            loss.register_forward_hook(lambda *given: note("loss", given[-1]))
        optimizer.register_step_pre_hook(lambda *_: note("gradients", [each.grad for each in learner.parameters]))
        optimizer.register_step_post_hook(lambda *_: note("weights", learner.parameters))
        for self.step, minibatch in enumerate(minibatches, start=run.start_step + 1):
            if self.step == stop:
                os.kill(os.getpid(), signal.SIGTERM)
            note("draws", run.draws.noted[0][0])
            note("crops", [minibatch["image"], minibatch["label"]])
            note("learning rates", [float(group["lr"]) for group in optimizer.param_groups])
            yield minibatch

    def _note(self, what: str, things: Any) -> None:
        of_step = self.sums.setdefault(self.step, {})
        of_step[what] = _sum(things, of_step.get(what, 0))


def _sum(things: Any, total: int = 0) -> int:
    """A checksum of tensors and other values."""
    for leaf in tree_leaves(things):
        is_tensor = isinstance(leaf, Tensor)
        own = leaf.detach().cpu().contiguous().reshape(-1).view(uint8).numpy() if is_tensor else repr(leaf).encode()
        total = zlib.crc32(own, total)
    return total


def check(train: Callable[[Any, str, Watch], object], config: TrainingRun) -> None:
    """Train for `trainer.resume_check` steps whole, and stopped and continued; compare both by all their tensors.

    Each is a process of its own with a temporary run directory. ValueError: they differ, and which part is the first.
    """
    if launched():
        raise ValueError(f"debug=resume compares runs of one process: start it without torchrun, as {config.entry}.py")
    steps = config.trainer.resume_check
    with tempfile.TemporaryDirectory(prefix="resume-") as name:
        folder, stop = Path(name), max(1, steps * 3 // 4)
        whole = _trained(train, config, folder / "whole", Watch(steps))
        before = _trained(train, config, folder / "stopped", Watch(steps, stop))
        both = before | _trained(train, config, folder / "stopped", Watch(steps))
        sums = [_sums(folder / run / "checkpoints" / "last.pt") for run in ("whole", "stopped")]
        if other := [name for name in sums[0] | sums[1] if sums[0].get(name) != sums[1].get(name)]:
            again, cure = _first(whole, _trained(train, config, folder / "again", Watch(steps)), config), ""
            said = f"{len(other)} of {len(sums[0])} tensors differ after {steps} steps, {other[0]} among them"
            if again:
                cure = "trainer.deterministic=true, and numbers drawn from the generators that parts are given"
                raise ValueError(f"debug=resume: {said}; but two whole runs differ already: {again}. Equal are: {cure}")
            raise ValueError(
                f"debug=resume: {said}, if the run is stopped after step {max(before)} and continued: "
                f"{_first(whole, both, config) or other[0]}. What a part keeps from step to step needs state_dict and "
                f"load_state_dict; others compute it from their arguments (docs/extending.md)"
            )
    if (file := passed(config)) is not None:
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
    said = f"{len(sums[0])} tensors are equal after {steps} steps, whole and stopped after step {max(before)}"
    make_console().print(f"debug=resume: {said} and continued", soft_wrap=True)


def passed(config: TrainingRun) -> Path | None:
    """The file that says that `check` has passed with these choices of plugins; None if there are none."""
    own = {name.partition(".")[0] for name in plugins.LOADED}
    groups = [(name, each) for name, each in vars(config).items() if hasattr(each, "name") or isinstance(each, dict)]
    pairs = [(name, one) for name, each in groups for one in (each.values() if isinstance(each, dict) else [each])]
    names = sorted(f"{name}={one.name}" for name, one in pairs if type(one).__module__.partition(".")[0] in own)
    digest = sha256(repr((names, sorted(plugins.hashes().items()))).encode()).hexdigest()
    return (cache_folder() or Path(tempfile.gettempdir())) / "resumed" / digest if names else None


def _sums(file: Path) -> dict[str, int]:
    """A checksum of each tensor of a checkpoint, and of what its parts keep."""

    def below(value: Any, place: str) -> Iterator[tuple[str, int]]:
        if isinstance(value, (Mapping, list, tuple)):
            pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
            for key, each in pairs:
                yield from below(each, f"{place}.{key}".lstrip("."))
        elif isinstance(value, Tensor) or place.startswith("parts."):
            yield place, _sum(value)

    return dict(below(checkpoint.load(file), ""))


def _first(whole: Sums, other: Sums, config: TrainingRun) -> str:
    """What differs first of two runs, and the choices that compute it; empty if nothing does."""
    for step, own in sorted(whole.items()):
        for what in (what for what in MADE_BY if own.get(what) != other.get(step, {}).get(what)):
            chosen = {group: getattr(config, group, None) or () for group in MADE_BY[what]}
            names = [
                f"{group}={','.join(it) if isinstance(it, dict) else it.name}" for group, it in chosen.items() if it
            ]
            return f"the {what} of step {step} differ, of {' and '.join(names) or f'data={config.data.name}'}"
    return ""


def _trained(train: Callable[[Any, str, Watch], object], config: TrainingRun, run_dir: Path, watch: Watch) -> Sums:
    """Train in another process; return its checksums. ValueError: it fails."""
    own, (log, sums) = copy.deepcopy(config), (run_dir.with_suffix(end) for end in (".log", ".json"))
    own.run_dir, own.resume, trainer = str(run_dir), "auto", own.trainer
    trainer.steps, trainer.epochs, trainer.resume_check = watch.steps, None, 0
    trainer.evaluate_every_steps = trainer.evaluate_every_epochs = trainer.patience = None
    trainer.checkpoint_every_steps = max(1, watch.steps // 3)
    process: Any = get_context("fork").Process(target=_train, args=(train, own, watch, log, sums))
    process.start()
    process.join()
    if process.exitcode:
        raise ValueError(f"debug=resume: a training fails: {log.read_text().rpartition('error: ')[2].strip()}")
    return {int(step): of_step for step, of_step in json.loads(sums.read_text()).items()}


def _train(
    train: Callable[[Any, str, Watch], object], config: TrainingRun, watch: Watch, log: Path, sums: Path
) -> None:
    die_with_parent(signal.SIGTERM)
    sys.stdout = sys.stderr = file = open(log, "w", buffering=1)
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
    with errors_for_users():
        with suppress(Preempted):
            train(config, "debug=resume", watch)
        sums.write_text(json.dumps(watch.sums))
