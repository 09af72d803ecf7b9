"""What stops a command while its modules load is said in a line."""

import os
import select
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.runs import REPOSITORY, command

INTERRUPTED = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(600)\n"


def loaded(arguments: list[str], **environment: str) -> tuple[int, str, str]:
    """The exit status and what is printed to stdout and stderr."""
    done = subprocess.run(
        arguments,
        cwd=REPOSITORY,
        env={"PATH": "/usr/bin:/bin", **environment},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("words", [command("train_seg"), [sys.executable, "-m", "scripts.make_classes"]])
def test_an_interrupted_import_ends_in_a_line(tmp_path, words):
    for name in ("omegaconf", "numpy"):  # whichever the command imports first
        (tmp_path / f"{name}.py").write_text(INTERRUPTED)
    assert loaded(words, PYTHONPATH=str(tmp_path)) == (-signal.SIGINT, "", "interrupted\n")


@pytest.mark.slow
def test_the_environment_chooses_no_window_for_figures():
    check = "import engine.process.start, matplotlib; matplotlib.get_backend()"
    assert loaded([sys.executable, "-c", check], MPLBACKEND="nonsense", MPLCONFIGDIR="/nowhere") == (0, "", "")


CACHES = """
import os
import keepless
assert not [name for name in os.environ if "INDUCTOR" in name]
import engine.process.start
folder = os.environ["TORCHINDUCTOR_CACHE_DIR"]
open(f"{folder}/code", "w").close()
print(folder, oct(os.stat(folder).st_mode & 0o777), os.environ["TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"], sep=",")
"""


@pytest.mark.table
@pytest.mark.parametrize("has_home", [True, False])
def test_commands_compile_into_a_folder_of_their_user_alone(tmp_path, has_home):
    """PyTorch loads pickles from a folder for temporary files, whose name everybody knows. The package sets nothing."""
    home = tmp_path / "home"
    home.mkdir() if has_home else home.touch()
    _, printed, _ = loaded([sys.executable, "-c", CACHES], HOME=str(home), TMPDIR=str(tmp_path))
    folder, mode, precompiles = printed.strip().split(",")
    assert (mode, precompiles) == ("0o700", "0")
    kept = home / ".cache" / "inplace-abn-segmentation" / "compiled"
    assert Path(folder) == kept if has_home else Path(folder).is_relative_to(tmp_path)
    assert Path(folder).exists() == has_home  # otherwise it lasts until the command ends
    assert {path.name for path in tmp_path.iterdir()} <= {"home"}


CLOSED = """
import engine.process.start, os, sys
with open(sys.argv[1], "w") as file:
    print("line"), print("warning", file=sys.stderr), os.system("echo child >&2"), sys.stdout.flush()
    print(sys.stdin.read() + "content", file=file)
"""


@pytest.mark.table
@pytest.mark.parametrize("first, end", [(0, 3), (0, 1), (1, 2)])
def test_nothing_printed_gets_into_a_file_if_the_standard_descriptors_are_closed(tmp_path, first, end):
    words, env = [sys.executable, "-c", CLOSED, str(tmp_path / "file")], {"PATH": "/usr/bin:/bin"}
    close = partial(os.closerange, first, end)
    done = subprocess.run(words, cwd=REPOSITORY, env=env, preexec_fn=close, stdin=subprocess.DEVNULL, timeout=300)
    assert done.returncode == 0 and (tmp_path / "file").read_text() == "content\n"


RANK = "import engine.process.start, time; print('started', flush=True); time.sleep(600)"
AGENT = """
import os, subprocess, sys, time
environment = {**os.environ, "TORCHELASTIC_RUN_ID": "1"}
print(subprocess.Popen([sys.executable, "-c", sys.argv[1]], env=environment, start_new_session=True).pid, flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells a process that its parent has ended")
def test_a_rank_ends_if_torchrun_is_killed_while_it_starts():
    """It ends at once, not after the rendezvous."""
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", AGENT, RANK]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as agent:
        rank = int(agent.stdout.readline())
        assert agent.stdout.readline() == "started\n"
        ended = os.pidfd_open(rank)
        agent.kill()
        if not select.select([ended], [], [], 120)[0]:
            os.kill(rank, signal.SIGKILL)
            raise AssertionError("the rank goes on")
