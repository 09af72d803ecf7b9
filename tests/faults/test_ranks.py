"""Two ranks under torchrun: one dies, all are asked to stop, or their number changes."""

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from datasets import synthetic
from tests.faults import runs
from tests.faults.runs import STEPS, case, children, ends, says, steps_of, stopped, survived, torchrun

pytestmark = pytest.mark.faults
SIGNALS = ("--signals-to-handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1")  # as in scripts/slurm.sbatch


@pytest.fixture(scope="module")
def whole_of_two(whole_of) -> Path:
    return whole_of("train_seg", 2)


def launched_until(step: int, run_dir: Path, *overrides: str, **options) -> tuple[subprocess.Popen, list[int]]:
    """torchrun after a step of its training, and the pids of its processes, by rank."""
    launched = torchrun(run_dir, *overrides, **options)
    return launched, runs.until_step(run_dir, step, launched)


@pytest.mark.injects("a rank dies", "SIGKILL to one of two ranks under torchrun; both started again")
@pytest.mark.parametrize("victim", [0, 1])
def test_the_others_stop_with_its_error(tmp_path, whole_of_two, victim):
    launched, ranks = launched_until(3, tmp_path / "run")
    os.kill(ranks[victim], signal.SIGKILL)
    output = ends(launched)
    assert launched.returncode != 0
    assert f"error: process {1 - victim} of the run lost another process" in output, output
    assert "start all of them again with resume=auto" in output, output
    # As the root cause or, if both ranks end in the same second, beside it.
    assert re.search(rf"rank      : {victim} (?:(?!rank  ).)*SIGKILL", output, re.DOTALL), output
    survived(tmp_path / "run", whole_of_two, processes=2)


PHOTOS = "train_imagenet"
RESTARTED = [
    case("a rank dies", "SIGKILL to one of two ranks under torchrun --max-restarts 1", "train_seg"),
    case("a rank dies", "SIGKILL to one of two ranks of a classification under torchrun --max-restarts 1", PHOTOS),
]


@pytest.mark.parametrize("entry", RESTARTED)
@pytest.mark.parametrize("victim", [0, 1])
def test_torchrun_restarts_and_resumes(tmp_path, whole_of, victim, entry):
    launched, ranks = launched_until(2, tmp_path / "run", options=("--max-restarts", "1"), entry=entry)
    os.kill(ranks[victim], signal.SIGKILL)
    output = ends(launched)
    assert launched.returncode == 0, output
    survived(tmp_path / "run", whole_of(entry, 2), entry=entry, processes=2)


@pytest.mark.injects("a rank dies", "rank 0 cannot write its checkpoint (its folder is a file), rank 1 goes on")
def test_what_torchrun_says_is_the_error_of_the_rank_that_failed(tmp_path, whole_of_two):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "checkpoints").write_text("a file, where a folder is to be")
    launched = torchrun(run_dir)
    root_cause = ends(launched).partition("Root Cause")[2]
    assert launched.returncode != 0
    assert "rank      : 0 " in root_cause and f"checkpoint {runs.last_of(run_dir)} of step 1" in root_cause
    (run_dir / "checkpoints").unlink()
    survived(run_dir, whole_of_two, processes=2)


@pytest.mark.injects("a rank hangs", "SIGSTOP to one of two ranks, trainer.timeout_seconds=5")
def test_who_waits_too_long_for_another_ends(tmp_path, whole_of_two, monkeypatch):
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "2")  # torchrun's grace period for the stopped rank
    launched, ranks = launched_until(3, tmp_path / "run", "trainer.timeout_seconds=5")
    os.kill(ranks[1], signal.SIGSTOP)
    output = ends(launched)
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
    output = ends(launched)  # a rank that hangs would be killed by torchrun after 30 seconds, and say nothing
    assert launched.returncode != 0 and label.name in output and "process 1 of the run lost another process" in output
    label.write_bytes(content)
    survived(tmp_path / "run", whole_of_two, f"data.root={root}", processes=2)


@pytest.mark.parametrize(
    "number, everyone",
    [
        *(
            case("preemption", "SIGTERM or SIGUSR1 to torchrun with two ranks, each with two data workers", n, False)
            for n in (signal.SIGTERM, signal.SIGUSR1)
        ),
        case(
            "preemption",
            "SIGUSR1 to torchrun, its two ranks and their data workers at once, as Slurm sends it",
            *(signal.SIGUSR1, True),
        ),
    ],
)
def test_torchrun_is_asked_to_stop(tmp_path, whole_of_two, number, everyone):
    options = (*SIGNALS, "--max-restarts", "3") if everyone else SIGNALS
    launched, ranks = launched_until(2, tmp_path / "run", "data.workers=2", options=options)
    others = [*(worker for rank in ranks for worker in children(rank)), *ranks] if everyone else []
    for pid in (*others, launched.pid):
        os.kill(pid, number)
    output = ends(launched)
    assert launched.returncode == 1  # torchrun does not pass on its processes' exit status 75
    stopped(tmp_path / "run", output)
    survived(tmp_path / "run", whole_of_two, processes=2)


@pytest.mark.injects("preemption", "SIGKILL to torchrun: its two ranks are left alone")
def test_ranks_stop_when_torchrun_is_killed(tmp_path, whole_of_two):
    launched, ranks = launched_until(2, tmp_path / "run")
    launched.kill()
    output = ends(launched)  # until the ranks have closed their output
    stopped(tmp_path / "run", output)
    survived(tmp_path / "run", whole_of_two, processes=2)


@pytest.mark.injects("another number of processes", "two ranks killed in a run that one process continues, and back")
@pytest.mark.parametrize("first", [1, 2])
def test_another_number_of_processes_continues_with_a_notice(tmp_path, first):
    run_dir = tmp_path / "run"
    if first == 2:
        launched, ranks = launched_until(3, run_dir)
        [os.kill(rank, signal.SIGKILL) for rank in ranks]
        ends(launched)
    else:
        runs.killed_after(3, run_dir)
    output = runs.finished(run_dir, processes=3 - first)
    notice = f"the run was on {first} x cpu and continues on {3 - first} x cpu: at the same step with the same"
    assert says(output, notice)
    assert steps_of(run_dir) == list(range(1, STEPS + 1))


@pytest.mark.injects("a machine is lost", "torchrun --nnodes 1:2, of two agents the second is killed with its rank")
def test_torchrun_goes_on_with_the_machines_that_are_left(tmp_path):
    elastic = ("--nnodes", "1:2", "--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-id", "faults")
    elastic += ("--rdzv-endpoint", f"localhost:{runs.free_port()}", "--rdzv-conf")
    run_dir = tmp_path / "run"
    hosts = []
    for keeps_the_rendezvous in (1, 0):  # otherwise, on a busy machine, the killed agent might host it
        conf = f"last_call_timeout=3,keep_alive_interval=1,is_host={keeps_the_rendezvous}"
        hosts.append(torchrun(run_dir, processes=1, options=(*elastic, conf)))
    runs.until_step(run_dir, 3, hosts[0])
    rank = children(hosts[1].pid)
    hosts[1].kill()
    [os.kill(pid, signal.SIGKILL) for pid in rank]
    output = ends(hosts[0], seconds=150)
    assert hosts[0].returncode == 0, output
    assert says(output, "the run was on 2 x cpu and continues on 1 x cpu")
    assert steps_of(run_dir) == list(range(1, STEPS + 1))
    hosts[1].communicate(timeout=60)
