"""What stops a command while its modules load is said in a line."""

import ctypes
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import REPOSITORY, command

INTERRUPTED = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(600)\n"


def loaded(arguments: list[str], **environment: str) -> tuple[int, str]:
    """The exit status and what is printed to stderr."""
    done = subprocess.run(
        arguments,
        cwd=REPOSITORY,
        env={"PATH": "/usr/bin:/bin", **environment},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("words", [command("train_seg"), [sys.executable, "-m", "scripts.make_classes"]])
def test_an_interrupted_import_ends_in_a_line(tmp_path, words):
    for name in ("omegaconf", "numpy"):  # whichever the command imports first
        (tmp_path / f"{name}.py").write_text(INTERRUPTED)
    assert loaded(words, PYTHONPATH=str(tmp_path)) == (-signal.SIGINT, "interrupted\n")


def test_the_environment_chooses_no_window_for_figures():
    check = "import engine.process.start, matplotlib; print(matplotlib.get_backend())"
    assert loaded([sys.executable, "-c", check], MPLBACKEND="nonsense", MPLCONFIGDIR=str(Path("/nowhere"))) == (0, "")


RANK = "print('loading', flush=True); import engine.process.start, time; print('started', flush=True); time.sleep(600)"
AGENT = r"""
import os, subprocess, sys, time
rank, late = sys.argv[1], sys.argv[2] == "True"
if late:  # it imports only after its parent has ended
    rank = f"import os, time\nwhile os.getppid() == {os.getpid()}: time.sleep(0.01)\n{rank}"
environment = {**os.environ, "TORCHELASTIC_RUN_ID": "1"}
subprocess.Popen([sys.executable, "-c", rank], env=environment, start_new_session=True)
time.sleep(0 if late else 600)
os._exit(0)
"""
PR_SET_CHILD_SUBREAPER = 36


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells a process that its parent has ended")
@pytest.mark.parametrize("late", [False, True], ids=["while it imports", "before it imports"])
def test_a_rank_ends_if_torchrun_is_killed_while_it_starts(tmp_path, late):
    """It ends at once, not after the rendezvous."""
    (tmp_path / "agent.py").write_text(AGENT)
    # The shell inherits orphans. Its output then ends when the rank does.
    (tmp_path / "init.sh").write_text('"$@"; exec >/dev/null 2>&1; sleep 600')
    shell = subprocess.Popen(
        ["/bin/sh", tmp_path / "init.sh", sys.executable, tmp_path / "agent.py", RANK, str(late)],
        cwd=REPOSITORY,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(REPOSITORY)},
        preexec_fn=lambda: ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    children = Path(f"/proc/{shell.pid}/task/{shell.pid}/children")
    try:
        assert shell.stdout is not None and shell.stderr is not None
        assert shell.stdout.readline() == "loading\n"
        if late:
            assert shell.stdout.readline() == ""
            assert shell.stderr.read() == "error: torchrun ended before this process started: start it again\n"
        else:
            assert shell.stdout.readline() == "started\n"
            (agent,) = children.read_text().split()
            rank = Path(f"/proc/{agent}/task/{agent}/children").read_text().strip()
            ended = os.pidfd_open(int(rank))
            os.kill(int(agent), signal.SIGKILL)
            assert select.select([ended], [], [], 120)[0]
    finally:
        for child in children.read_text().split():
            os.kill(int(child), signal.SIGKILL)
        shell.kill()
        shell.communicate()
