"""Commands that run one after the other: all run, whatever becomes of each, and a stop is a stop of all."""

import os
import signal
import sys

import pytest

from engine.process import jobs
from engine.process.console import make_console
from engine.process.jobs import ENDED_BEFORE, print_summary, run_job
from engine.process.stopping import EXIT_CODE, ONE_REQUEST_SECONDS, Preempted


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_each_failure_is_a_line(capfd):
    commands = {
        "good": python("print('printed')"),
        "wrong": python("import sys; sys.exit('error: what is wrong')"),
        "killed": python("import os; os.kill(os.getpid(), 9)"),
        "silent": python("import sys; sys.exit(3)"),
    }
    console = make_console()
    results = [run_job("job 2 of 5", title, command, console) for title, command in commands.items()]
    assert len(print_summary([ENDED_BEFORE, *results, ENDED_BEFORE], console)) == 3
    printed = capfd.readouterr()
    *_, summary = printed.out.partition("1 succeeded, 2 had already finished, 3 failed\n")
    assert summary.splitlines() == [
        "failed: wrong: exit status 1",
        "failed: killed: killed by SIGKILL",
        "failed: silent: exit status 3",
    ]
    assert "job 2 of 5: wrong\n" in printed.out and "printed\n" in printed.out
    assert "error: what is wrong\n" in printed.err


@pytest.mark.parametrize("number", ONE_REQUEST_SECONDS)
def test_a_stop_goes_on_to_the_job_and_ends_all(number, tmp_path):
    """The job asks its parent to stop, and ends by the same signal."""
    heard = tmp_path / "heard"
    code = f"""
import os, pathlib, signal, sys, time
signal.signal({number:d}, lambda *_: sys.exit(pathlib.Path({str(heard)!r}).write_text("")))
os.kill(os.getppid(), {number:d})
time.sleep(60)
"""
    before = signal.signal(number, own := signal.SIG_DFL)
    try:
        with pytest.raises(Preempted, match="^stopped in job 1 of 2, first$"):
            run_job("job 1 of 2", "first", python(code), make_console())
        assert heard.exists() and signal.getsignal(number) == own
    finally:
        signal.signal(number, before)


def test_a_job_that_was_asked_to_stop_ends_all_and_ignored_signals_stay_ignored():
    with pytest.raises(Preempted, match="^stopped in job 1 of 2, first$"):
        run_job("job 1 of 2", "first", python(f"import sys; sys.exit({EXIT_CODE})"), make_console())
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as the shell does for a job in the background
    try:
        assert run_job("job", "only", python(f"import os; os.kill({os.getpid()}, 2)"), make_console()) is None
    finally:
        signal.signal(signal.SIGINT, before)


def test_submitit_s_handler_is_called_once_its_job_has_saved_and_ended(monkeypatch, tmp_path):
    """It requeues the job: earlier, the run would continue from an older checkpoint."""
    handled: list[bool] = []
    checkpoint = tmp_path / "checkpoint"
    code = f"""
import os, pathlib, signal, sys, time
signal.signal(signal.SIGUSR2, lambda *_: pathlib.Path({str(checkpoint)!r}).touch() or sys.exit({EXIT_CODE}))
os.kill(os.getppid(), signal.SIGUSR2)
time.sleep(60)
"""
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    monkeypatch.setattr(jobs, "SECONDS_TO_END", 0)
    before = signal.signal(signal.SIGUSR2, lambda *_: handled.append(checkpoint.exists()))
    try:
        with pytest.raises(Preempted):
            run_job("job", "only", python(code), make_console())
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert handled == [True]
