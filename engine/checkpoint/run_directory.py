"""A run's folder: the paths of its files, and whether a run may start or resume there."""

import fcntl
import os
import platform
import re
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import IO

from engine.checkpoint import files as checkpoint
from engine.checkpoint.recorded import of_checkpoint
from engine.configuration.config import values_but
from engine.configuration.help import as_text
from engine.process.console import logger
from engine.process.output_files import NO_ROOM, explained, untouched
from engine.process.plugins import name_of
from engine.process.transfers import HostCopy
from engine.schema.keys import named_after, override
from engine.schema.training import TrainingRun

SECONDS_FOR_ANOTHER = 120  # to wait for another process to end: a requeued job may start before the old one is gone
_SHOWN_CHANGES = 6  # of all keys that differ
_ANOTHER = "give another run_dir to start a new run"


def new_run_path(dataset: str, norm: str, overrides: Sequence[str]) -> str:
    """A run's default folder, whose name TensorBoard lists. Microseconds make it unique."""
    parts = ["runs", f"{dataset}-{norm}", *([named_after(overrides)] if overrides else [])]
    return "/".join([*parts, f"{datetime.now():%Y-%m-%d_%H-%M-%S.%f}"])


class RunDirectory:
    """Paths of a run's files below `path`; saves and loads its checkpoints.

    Attributes:
        resumed: the file that `checkpoint_to_resume` has read.
        notice: for the log, why `checkpoint_to_resume` did not return the last checkpoint, or that data have changed.
    """

    def __init__(self, path: str):
        self.path = Path(path)
        self.config = self.path / "config.yaml"
        self.log = self.path / "log.txt"
        self.results = self.path / "results.json"
        self.metrics = self.path / "metrics.jsonl"
        self.last = self.path / "checkpoints" / "last.pt"
        self.previous = self.path / "checkpoints" / "previous.pt"  # the one before `last`
        self.best = self.path / "checkpoints" / "best.pt"
        self.lock_file = self.path / ".lock"
        self.resumed = self.last
        self.notice: str | None = None
        self._last_is_good = True  # or does not exist
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="save")
        self._saving: Future | None = None
        self._lock: IO | None = None

    def start_saving(self, state: dict, best: bool = False) -> None:
        """Copy `state`; a thread writes the last checkpoint and keeps the one before it, or writes the `best`.

        Raises the error of the previous save (OSError: see `checkpoint.save`).
        """
        self.finish_saving()
        copied = HostCopy(state)
        self._saving = self._thread.submit(lambda: self._write(copied.wait(), best))

    def _write(self, state: dict, best: bool) -> None:
        self.check_in_place()
        if best:
            checkpoint.save(self.best, state)
            return
        checkpoint.save(self.last, state, previous=self.previous if self._last_is_good else None)
        self._last_is_good = True

    def check_in_place(self) -> None:
        """Raise OSError if the path no longer leads to the locked file: a write would leave half a run there."""
        if self._lock is None:
            return
        with suppress(OSError):
            if os.path.samestat(os.stat(self.lock_file), os.fstat(self._lock.fileno())):
                return
        raise OSError(
            f"run_dir={self.path} (or the file {self.lock_file.name} in it) was removed or renamed while the run used "
            f"it: restore it and continue with resume=auto, or start the run again"
        )

    def finish_saving(self) -> None:
        """Wait until the save that `start_saving` began is written, then check the folder.

        If the save failed, its error is raised, once. `check_in_place` may raise OSError.
        """
        saving = self._saving
        self._saving = None
        if saving is not None:
            saving.result()
        self.check_in_place()

    def raise_if_save_failed(self) -> None:
        """Raise what `finish_saving` would, as far as it is known: a save that is under way is not waited for."""
        if self._saving is not None and self._saving.done():
            self.finish_saving()
        else:
            self.check_in_place()

    def _error(self, message: str) -> ValueError:
        return ValueError(f"run_dir={self.path}{message}")

    def lock(self) -> None:
        """Lock the folder against other runs until `in_use` ends or the process dies.

        ValueError: another process trains here and does not end within `SECONDS_FOR_ANOTHER`.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = open(self.lock_file, "a", opener=untouched)
        started_s = time.monotonic()
        is_reported = False
        while True:
            try:
                fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # data workers do not inherit it
                self._lock.truncate(0)
                self._lock.write(f"process {os.getpid()} on {platform.node()}")
                self._lock.flush()
                return
            except (BlockingIOError, PermissionError) as error:
                holder = f"another process ({self.lock_file.read_text()})"
                if time.monotonic() - started_s > SECONDS_FOR_ANOTHER:
                    raise self._error(f": {holder} is training there; end it, or give another run_dir") from error
                if not is_reported:
                    logger.warning(f"{holder} is training in run_dir={self.path}: waiting for it to end")
                    is_reported = True
            except OSError:  # a filesystem without locks, or a full one
                return
            time.sleep(0.2)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Context that adds the last good checkpoint and advice to a run's errors."""
        try:
            try:
                yield
            except BaseException:
                with suppress(Exception):  # the first error counts
                    self.finish_saving()
                raise
            self.finish_saving()
        except FloatingPointError as error:
            raise FloatingPointError(f"{error}. {self._advice_on_values()}") from error
        except OSError as error:
            self.check_in_place()
            message = self._message_about_files(error)
            if message is None:
                raise
            raise OSError(message) from error
        finally:
            if self._lock is not None:
                self._lock.close()
                self._lock = None

    def _advice_on_values(self) -> str:
        """What to do about a loss, gradient or weight that is not finite."""
        good = checkpoint.last_good(self.last, self.previous)
        if good is None:
            return "There is no checkpoint yet: try a lower optim.lr"
        start = shlex.quote(override("init.weights", good[0]))
        return (
            f"The last good checkpoint is {good[0]}, of step {good[1]}: with another run_dir, {start} starts from its "
            f"weights, for example with a lower optim.lr"
        )

    def _message_about_files(self, error: OSError) -> str | None:
        """What an error of the system means for this folder, and what to do; None if the error says so itself."""
        file = os.fsdecode(error.filename) if isinstance(error.filename, (str, bytes)) else ""
        is_full = error.errno in NO_ROOM
        if not is_full and not (file and Path(file).is_relative_to(self.path)):
            return None
        words, cure = explained(error, self.path)
        cure = f"Give another run_dir, or {cure[0].lower()}{cure[1:]}"
        if is_full or checkpoint.last_good(self.last, self.previous):
            cure = checkpoint.recovery_advice(error, self.path, self.last, self.previous)
        problem = "cannot be written to" if is_full else f"cannot be used: {file}"
        return f"run_dir={self.path} {problem}: {words}. {cure}"

    def checkpoint_to_resume(
        self,
        config: TrainingRun,
        total_steps: int,
        files: dict[str, list[str]],
        descriptions: Mapping[str, str] | None = None,
    ) -> dict | None:
        """The state to resume from; None for a new run.

        If the last checkpoint is damaged or gone, this is the previous one, and `notice` says so. `notice` also reports
        data files whose size has changed. `config` gets the mean and std that the run measured when it began. `files`:
        {split: [hash of names, of sizes, of the labels' numbering]}.
        `descriptions`: what a split holds, in words.

        ValueError: the folder holds a run and `config.resume` is not "auto"; or its checkpoints are damaged, or its
        configuration or its data differ.
        """
        if not any(map(os.path.lexists, (self.last, self.previous))):
            self._check_nothing_is_lost(config.resume)
            return None
        if config.resume is None:
            raise self._error(" already holds a run: give resume=auto to continue it, or another run_dir")
        state = self._load_newest_good()
        if not {*checkpoint.OF_TRAINING} <= state.keys():  # scripts.convert_checkpoint wrote it
            raise self._error(f" has only a run's weights, which cannot be resumed: {self._new_run_advice()}")
        recorded = of_checkpoint(state, f"run_dir={self.path}")
        if recorded.task != config.task:
            program = f"{recorded.entry}.py continues it"
            raise self._error(f" is for the task {recorded.task}: expected {config.task}; {program}")
        if config.data.is_measured:  # as the run measured at its start
            config.data.mean = config.data.mean or recorded.data.mean
            config.data.std = config.data.std or recorded.data.std
        self._check_configuration(state, recorded, config, total_steps)
        self._check_files(state["data"], files, descriptions or {})
        return state

    def _check_configuration(self, state: dict, recorded: TrainingRun, config: TrainingRun, total_steps: int) -> None:
        """ValueError if the run of a checkpoint, with the configuration `recorded`, has another one than `config`."""
        changes = _changes(recorded, config)
        if not changes:
            return
        listed = "; ".join(changes[:_SHOWN_CHANGES])
        advice = "Give the same values to continue it, or with others"
        if len(changes) > _SHOWN_CHANGES and self.config.is_file():
            listed += f" and {len(changes) - _SHOWN_CHANGES} more"
            command = self.config.read_text("utf-8", "replace").partition("\n")[0].removeprefix("# ")
            advice = f"It was started by {command}: give the same to continue it, and resume=auto; or with other values"
        if checkpoint.has_ended(state) and state["total_steps"] < total_steps:
            advice = "The run has ended. To train its weights for longer,"
        raise self._error(f" holds a run with another configuration: {listed}. {advice} {self._new_run_advice()}")

    def _check_nothing_is_lost(self, resume: str | None) -> None:
        """ValueError: a new run would overwrite a user's file, or files of a run whose last checkpoints are gone.

        Or the folder is one of checkpoints, in a run's own. With resume=auto, records alone may be overwritten: of a
        run that has died before its first checkpoint.
        """
        text = self.config.read_text("utf-8", "replace").strip("\0") if self.config.is_file() else ""
        if text and not re.search(r"^# \d+ x \w+$", text, re.MULTILINE):  # a power cut may leave zeros
            raise self._error(f" holds a {self.config.name} of something else, which a run would overwrite: {_ANOTHER}")
        if os.path.lexists(self.path / self.last.name):
            raise self._error(f" holds the checkpoints of a run: give run_dir={self.path.parent}")
        names = [path.name for path in (self.best, self.results, self.metrics) if os.path.lexists(path)]
        if resume is None and names:
            raise self._error(
                f" already holds {', '.join(names)} of a run, which a new run would overwrite: {_ANOTHER}"
            )
        if self.best.name in names or self.results.name in names:
            problem = f"it holds {', '.join(names)}, but {self.last} and {self.previous} are gone"
            raise self._error(f" cannot be continued: {problem}. {self._restore_advice()}")

    def _restore_advice(self) -> str:
        """What to do if neither of the last checkpoints is good."""
        copy = f", copy {self.best} to {self.last} to continue from its step" if self.best.is_file() else ""
        return f"Restore one of the two{copy}, or {_ANOTHER}"

    def _new_run_advice(self) -> str:
        """How to start from the weights of the last checkpoint."""
        return f"start a new run: another run_dir, and {shlex.quote(override('init.weights', self.last))}"

    def _check_files(self, recorded: dict, files: dict[str, list[str]], descriptions: Mapping[str, str]) -> None:
        """ValueError if file names or the labels' numbering have changed; a notice if sizes have."""
        for split, (names, sizes, numbering) in files.items():
            recorded_names, recorded_sizes, recorded_numbering = recorded.get(split, ("", "", ""))
            if names != recorded_names or numbering != recorded_numbering:
                change = f"{split} labels number the classes differently"
                if names != recorded_names:
                    change = f"{split} files were added, removed or renamed (now {descriptions.get(split)})"
                raise self._error(f" holds a run on other data: {change}. Continue it on the same data, or {_ANOTHER}")
            if sizes != recorded_sizes:
                changed = f"{split} files have other sizes than when the run was last saved: their content changed"
                self.notice = f"{self.notice}; {changed}" if self.notice else changed

    def _load_newest_good(self) -> dict:
        """The last checkpoint, or if it is damaged or gone the previous one, which `resumed` and `notice` then say."""
        try:
            return checkpoint.load(self.last)
        except ValueError as error:
            reason = error
        self._last_is_good = False
        try:
            state = checkpoint.load(self.previous)
        except ValueError as error:
            # Without their advice to take the other checkpoint.
            reasons = "; ".join(str(problem).partition("; ")[0] for problem in (reason, error))
            raise self._error(f" cannot be continued: {reasons}. {self._restore_advice()}") from error
        self.resumed = self.previous
        self.notice = f"{reason}. The run continues from {self.previous}, of step {state['step']}"
        return state


def _changes(recorded: TrainingRun, config: TrainingRun) -> list[str]:
    """Texts "KEY was … and is …" of each key that differs between two configurations, and must not in a resumed run."""
    recorded_values = values_but(recorded, "free_on_resume")
    values = values_but(config, "free_on_resume")
    keys = recorded_values.keys() | values.keys()
    if {*recorded.plugins} < {*map(name_of, config.plugins)}:  # more, such as a logger's, change nothing
        keys -= {"plugins"}
    changed = (key for key in sorted(keys) if recorded_values.get(key) != values.get(key))
    return [f"{key} was {as_text(recorded_values.get(key))} and is {as_text(values.get(key))}" for key in changed]
