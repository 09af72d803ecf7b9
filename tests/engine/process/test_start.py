"""What stops a command while its modules load is said in a line."""

import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import REPOSITORY, command

INTERRUPTED = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(600)\n"


def loaded(arguments: list[str], addresses: int = resource.RLIM_INFINITY, **environment: str) -> tuple[int, str]:
    """The exit status and what is printed to stderr. `addresses`: ulimit -v in bytes."""

    def limit() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        resource.setrlimit(resource.RLIMIT_AS, (addresses, addresses))

    done = subprocess.run(
        arguments,
        cwd=REPOSITORY,
        env={"PATH": "/usr/bin:/bin", **environment},
        preexec_fn=limit,
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


@pytest.mark.parametrize("threads", ["0", "-1", "abc", "10000", "4,0"])
def test_a_wrong_number_of_threads_is_named(threads):
    expected = f"error: OMP_NUM_THREADS={threads}: expected a number of threads, 1 to 1024\n"
    assert loaded(command("train_seg"), OMP_NUM_THREADS=threads) == (1, expected)


def test_too_few_addresses_are_named():
    status, said = loaded(command("eval"), addresses=2**30)
    assert status == 1 and said.startswith("error: ") and said.count("\n") == 1
    assert "ulimit -v permits 1,024 MiB of addresses, which may be too few for PyTorch alone; raise it" in said


def test_the_environment_chooses_no_window_for_figures():
    check = "import engine.process.start, matplotlib; print(matplotlib.get_backend())"
    assert loaded([sys.executable, "-c", check], MPLBACKEND="nonsense", MPLCONFIGDIR=str(Path("/nowhere"))) == (0, "")
