"""Two ranks under torchrun: one dies, all are asked to stop, or their number changes."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from datasets import synthetic
from engine import checkpoint
from tests.faults.runs import STEPS, Run, children, free_port, says, steps_of, survived, torchrun

pytestmark = pytest.mark.faults
SIGNALS = ("--signals-to-handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1")  # as in scripts/slurm.sbatch


@pytest.fixture(scope="module")
def whole_of_two(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole_of_two") / "run"
    launched = torchrun(folder)
    output, _ = launched.communicate(timeout=120)
    assert launched.returncode == 0, output
    return folder


def until_step(run_dir: Path, step: int, launched: subprocess.Popen, seconds: float = 90) -> list[int]:
    """Wait for a step; return the pids of torchrun's processes, by rank."""
    deadline = time.monotonic() + seconds
    while step not in steps_of(run_dir):
        assert launched.poll() is None and time.monotonic() < deadline, launched.communicate(timeout=60)[0]
        time.sleep(0.005)
    return children(launched.pid)


def ends(launched: subprocess.Popen, seconds: float = 60) -> str:
    """Wait for torchrun to end in time; return its output."""
    try:
        return launched.communicate(timeout=seconds)[0]
    except subprocess.TimeoutExpired:
        launched.kill()
        raise AssertionError(f"it hangs:\n{launched.communicate(timeout=60)[0]}") from None


@pytest.mark.injects("a rank dies", "SIGKILL to one of two ranks under torchrun; both started again")
@pytest.mark.parametrize("victim", [0, 1])
def test_the_others_stop_with_its_error(tmp_path, whole_of_two, victim):
    launched = torchrun(tmp_path / "run")
    ranks = until_step(tmp_path / "run", 3, launched)
    os.kill(ranks[victim], signal.SIGKILL)
    output = ends(launched)
    assert launched.returncode != 0
    assert f"error: process {1 - victim} of the run lost another process" in output, output
    assert "start all of them again with resume=auto" in output, output
    # As the root cause or, if both ranks end in the same second, beside it.
    assert re.search(rf"rank      : {victim} (?:(?!rank  ).)*SIGKILL", output, re.DOTALL), output
    survived(tmp_path / "run", whole_of_two, processes=2)


@pytest.mark.injects("a rank dies", "SIGKILL to one of two ranks under torchrun --max-restarts 1")
@pytest.mark.parametrize("victim", [0, 1])
def test_torchrun_restarts_and_resumes(tmp_path, whole_of_two, victim):
    launched = torchrun(tmp_path / "run", options=("--max-restarts", "1"))
    ranks = until_step(tmp_path / "run", 3, launched)
    os.kill(ranks[victim], signal.SIGKILL)
    output = ends(launched, seconds=120)
    assert launched.returncode == 0, output
    survived(tmp_path / "run", whole_of_two, processes=2)


@pytest.mark.injects("a rank dies", "rank 0 cannot write its checkpoint (its folder is a file), rank 1 goes on")
def test_what_torchrun_says_is_the_error_of_the_rank_that_failed(tmp_path, whole_of_two):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "checkpoints").write_text("a file, where a folder is to be")
    launched = torchrun(run_dir)
    output = ends(launched, seconds=120)
    assert launched.returncode != 0
    root_cause = output.partition("Root Cause")[2]
    assert (
        "rank      : 0 " in root_cause and f"checkpoint {run_dir / 'checkpoints' / 'last.pt'} of step 1" in root_cause
    )
    (run_dir / "checkpoints").unlink()
    assert "lost" not in survived(run_dir, whole_of_two, processes=2)


@pytest.mark.injects("a rank hangs", "SIGSTOP to one of two ranks, trainer.timeout_seconds=5")
def test_who_waits_too_long_for_another_ends(tmp_path, whole_of_two, monkeypatch):
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "2")  # torchrun's grace period for the stopped rank
    launched = torchrun(tmp_path / "run", "trainer.timeout_seconds=5")
    ranks = until_step(tmp_path / "run", 3, launched)
    os.kill(ranks[1], signal.SIGSTOP)
    output = ends(launched, seconds=90)
    assert launched.returncode != 0
    lost = "process 0 of the run lost another process, or waited for it longer than trainer.timeout_seconds=5"
    assert says(output, lost)
    survived(tmp_path / "run", whole_of_two, processes=2)


@pytest.mark.injects("corrupt image", "found by the first of two ranks before the training, while the other waits")
def test_all_end_where_the_first_finds_bad_data(tmp_path, whole_of_two):
    root = tmp_path / "streets"
    synthetic(root, "val")
    label = synthetic(root, "train").files[3].label
    content = label.read_bytes()
    label.write_bytes(content[:100])
    launched = torchrun(tmp_path / "run", f"data.root={root}")
    output = ends(launched, seconds=25)  # torchrun would kill a hanging rank after another 30 seconds
    assert launched.returncode != 0 and label.name in output and "process 1 of the run lost another process" in output
    label.write_bytes(content)
    survived(tmp_path / "run", whole_of_two, f"data.root={root}", processes=2)


@pytest.mark.injects("preemption", "SIGTERM or SIGUSR1 to torchrun with two ranks, each with two data workers")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_torchrun_is_asked_to_stop(tmp_path, whole_of_two, number):
    launched = torchrun(tmp_path / "run", "data.workers=2", options=SIGNALS)
    until_step(tmp_path / "run", 2, launched)
    launched.send_signal(number)
    output = ends(launched)
    assert launched.returncode == 1  # torchrun does not pass on its processes' exit status 75
    step = checkpoint.load(tmp_path / "run" / "checkpoints" / "last.pt")["step"]
    assert says(output, f"stopped after step {step} of {STEPS}; exit status 75")
    assert steps_of(tmp_path / "run") == list(range(1, step + 1))
    survived(tmp_path / "run", whole_of_two, processes=2)


@pytest.mark.injects(
    "preemption", "SIGUSR1 to torchrun, its two ranks and their data workers at once, as Slurm sends it"
)
def test_everyone_is_asked_to_stop(tmp_path, whole_of_two):
    launched = torchrun(tmp_path / "run", "data.workers=2", options=(*SIGNALS, "--max-restarts", "3"))
    ranks = until_step(tmp_path / "run", 2, launched)
    for pid in [*(worker for rank in ranks for worker in children(rank)), *ranks, launched.pid]:
        os.kill(pid, signal.SIGUSR1)
    output = ends(launched)
    step = checkpoint.load(tmp_path / "run" / "checkpoints" / "last.pt")["step"]
    assert launched.returncode == 1 and says(output, f"stopped after step {step} of {STEPS}; exit status 75")
    survived(tmp_path / "run", whole_of_two, processes=2)


@pytest.mark.injects("another number of processes", "two ranks killed in a run that one process continues, and back")
@pytest.mark.parametrize("first", [1, 2])
def test_another_number_of_processes_continues_with_a_notice(tmp_path, first):
    run_dir = tmp_path / "run"
    if first == 2:
        launched = torchrun(run_dir)
        ranks = until_step(run_dir, 3, launched)
        [os.kill(rank, signal.SIGKILL) for rank in ranks]
        ends(launched)
        run = Run(run_dir)
        assert run.ends() == 0
        output = run.output
    else:
        run = Run(run_dir).until_step(3)
        run.send(signal.SIGKILL)
        run.ends()
        output = ends(torchrun(run_dir), seconds=120)
    assert says(
        output, f"the run was on {first} x cpu and continues on {3 - first} x cpu: at the same step with the same"
    )
    assert steps_of(run_dir) == list(range(1, STEPS + 1))


@pytest.mark.injects("a machine is lost", "torchrun --nnodes 1:2, of two agents the second is killed with its rank")
def test_torchrun_goes_on_with_the_machines_that_are_left(tmp_path):
    elastic = ("--nnodes", "1:2", "--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-id", "faults")
    elastic += ("--rdzv-endpoint", f"localhost:{free_port()}", "--rdzv-conf")
    run_dir = tmp_path / "run"
    hosts = []
    for keeps_the_rendezvous in (1, 0):  # otherwise, on a busy machine, the killed agent might host it
        conf = f"last_call_timeout=3,keep_alive_interval=1,is_host={keeps_the_rendezvous}"
        hosts.append(torchrun(run_dir, processes=1, options=(*elastic, conf)))
    until_step(run_dir, 3, hosts[0])
    rank = children(hosts[1].pid)
    hosts[1].kill()
    [os.kill(pid, signal.SIGKILL) for pid in rank]
    output = ends(hosts[0], seconds=150)
    assert hosts[0].returncode == 0, output
    assert says(output, "the run was on 2 x cpu and continues on 1 x cpu")
    assert steps_of(run_dir) == list(range(1, STEPS + 1))
    hosts[1].communicate(timeout=60)
