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

ENDED_BEFORE = "had already finished"  # in place of a job's failure


def run_job(place: str, title: str, command: Sequence[str], console: Console, folder: Path | None = None) -> str | None:
    """Run a command, which prints its own errors, in `folder`. Returns None, or how it failed.

    `place`: among the jobs, such as "job 1 of 3". A stop signal (`ONE_REQUEST_SECONDS`) is passed on to the command.
    In a job of submitit's, its handler is then called.

    Preempted: this process or the command was asked to stop.
    """
    console.print(f"{place}: {title}", style="bold", soft_wrap=True)
    console.print(shlex.join(command), soft_wrap=True)
    received: list[int] = []
    process: subprocess.Popen | None = None

    def pass_on(number: int, frame: object) -> None:
        """Handle a signal, as `signal.signal` has it."""
        received.append(number)
        if process is not None:
            process.send_signal(number)

    previous_handlers = handle_stop_signals(pass_on)
    try:
        with subprocess.Popen(
            command,
            cwd=folder,
            preexec_fn=lambda: die_with_parent(signal.SIGTERM),  # on which it saves and ends
        ) as process:
            if received:  # while it started
                process.send_signal(signal.SIGTERM)
            returncode = process.wait()
        if received or returncode == EXIT_CODE:
            _requeue_submitit_job(previous_handlers, received)
            raise Preempted(f"stopped in {place}, {title}")
    finally:
        restore_handlers(previous_handlers)
    if returncode == 0:
        return None
    error = f"killed by {signal.Signals(-returncode).name}" if returncode < 0 else f"exit status {returncode}"
    console.print(f"failed: {error}", style="red", soft_wrap=True)
    return f"{title}: {error}"


def print_summary(results: Sequence[str | None], console: Console) -> list[str]:
    """Print how many jobs succeeded (None), how many `ENDED_BEFORE`, and which failed; return these failures."""
    failures = [result for result in results if result and result != ENDED_BEFORE]
    counts = f"{results.count(None)} succeeded, {results.count(ENDED_BEFORE)} had already finished"
    console.print(f"{counts}, {len(failures)} failed", soft_wrap=True)
    for failure in failures:
        console.print(f"failed: {failure}", soft_wrap=True)
    return failures


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
