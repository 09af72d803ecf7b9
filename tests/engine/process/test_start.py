"""What stops a command while its modules load is said in a line."""

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


@pytest.mark.injects("preemption", "SIGINT while modules are imported", into="files")
@pytest.mark.parametrize("words", [command("train_seg"), [sys.executable, "-m", "scripts.make_classes"]])
def test_an_interrupted_import_ends_in_a_line(tmp_path, words):
    for name in ("omegaconf", "numpy"):  # whichever the command imports first
        (tmp_path / f"{name}.py").write_text(INTERRUPTED)
    assert loaded(words, PYTHONPATH=str(tmp_path)) == (-signal.SIGINT, "interrupted\n")


def test_the_environment_chooses_no_window_for_figures():
    check = "import engine.process.start, matplotlib; print(matplotlib.get_backend())"
    assert loaded([sys.executable, "-c", check], MPLBACKEND="nonsense", MPLCONFIGDIR=str(Path("/nowhere"))) == (0, "")
