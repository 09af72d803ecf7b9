"""Run commands one after the other: the trainings of a sweep, or of a table."""

from engine.process.start import die_with_parent

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from engine.process.stopping import EXIT_CODE, SECONDS_TO_END, Preempted, handle_stop_signals, restore_handlers


def run_jobs(
    jobs: Mapping[str, list[str]],
    console: Console,
    *,
    ended_before: int = 0,
    folder: Path | None = None,
    variables: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Run all commands {title: command} in `folder`, even if some fail; return {title: error} of those.

    The last lines say how many succeeded, how many had finished before this call (`ended_before`), and which failed;
    commands print their own errors. `variables`: of their environment, beside this process's. A stop signal
    (`ONE_REQUEST_SECONDS`) is passed on to the running command, and no other command starts. In a job of submitit's,
    its handler is then called.

    Preempted: this process or a command was asked to stop.
    """
    failed: dict[str, str] = {}
    stop_signals = _StopSignals()
    previous_handlers = handle_stop_signals(stop_signals.receive)
    try:
        for number, (title, command) in enumerate(jobs.items(), start=1):
            console.print(f"job {number} of {len(jobs)}: {title}", style="bold", soft_wrap=True)
            console.print(shlex.join(command), soft_wrap=True)
            returncode = _run_until_ended(command, stop_signals, folder, {**os.environ, **(variables or {})})
            if stop_signals.received or returncode == EXIT_CODE:
                _requeue_submitit_job(previous_handlers, stop_signals.received)
                raise Preempted(f"stopped in job {number} of {len(jobs)}, {title}")
            if returncode:
                failed[title] = _failure_text(returncode)
                console.print(f"failed: {failed[title]}", style="red", soft_wrap=True)
    finally:
        restore_handlers(previous_handlers)
    succeeded = len(jobs) - len(failed)
    console.print(f"{succeeded} succeeded, {ended_before} had already finished, {len(failed)} failed", soft_wrap=True)
    for title, error in failed.items():
        console.print(f"failed: {title}: {error}", soft_wrap=True)
    return failed


class _StopSignals:
    """The stop signals that this process has received, each passed on to the running command."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self.process: subprocess.Popen | None = None  # the running command

    def receive(self, number: int, frame: object) -> None:
        """Handle a signal, as `signal.signal` has it."""
        self.received.append(number)
        if self.process is not None:
            self.process.send_signal(number)


def _run_until_ended(
    command: Sequence[str], stop_signals: _StopSignals, folder: Path | None, environment: Mapping[str, str]
) -> int:
    """Run a command, which gets the stop signals; return its exit status, negative if a signal killed it."""
    with subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        preexec_fn=lambda: die_with_parent(signal.SIGTERM),  # on which it saves and ends
    ) as process:
        stop_signals.process = process
        if stop_signals.received:  # while it started
            process.send_signal(signal.SIGTERM)
        returncode = process.wait()
    stop_signals.process = None
    return returncode


def _failure_text(returncode: int) -> str:
    """How a command failed: its exit status, or the signal that killed it."""
    return f"killed by {signal.Signals(-returncode).name}" if returncode < 0 else f"exit status {returncode}"


def _requeue_submitit_job(handlers: Mapping[int, Any], stopped: Sequence[int]) -> None:
    """Call submitit's handlers of the signals that have stopped its job. They requeue the job, and end rank 0.

    Other ranks wait for that: the end of one would end rank 0 too early.
    """
    for number in stopped:
        handler = handlers.get(number)
        if "SUBMITIT_EXECUTOR" in os.environ and number in (signal.SIGUSR1, signal.SIGUSR2) and callable(handler):
            handler(number, None)
            time.sleep(SECONDS_TO_END)


def has_ended(run_dir: Path, words: Sequence[str], process_count: int = 1) -> bool:
    """Whether the exact command `python WORDS` has left results in its run directory, from that many processes.

    `words`: as typed, because the run writes them into its config.yaml that way.
    """
    config = run_dir / "config.yaml"
    command = shlex.join(["python", *words])
    if not ((run_dir / "results.json").is_file() and config.is_file()):
        return False
    return config.read_text("utf-8", "replace").startswith(f"# {command}\n# {process_count} x ")
