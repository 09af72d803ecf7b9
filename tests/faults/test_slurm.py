"""scripts/slurm.sbatch with stand-ins for srun and scontrol: what it starts, and when it requeues the job."""

import os
import signal
import subprocess

import pytest

from tests.runs import REPOSITORY

# Prints its options, then becomes the command, so the command gets its signals.
SRUN = '#!/bin/bash\nwhile [[ $1 == --* ]]; do echo "$1"; shift; done\nexec "$@"\n'
SCONTROL = '#!/bin/bash\n[[ $1 == show ]] && echo localhost || echo "$@" >> "$QUEUE"\n'
# Prints its arguments and sleeps; on SIGUSR1 it ends with status 1, as torchrun does.
TORCHRUN = '#!/bin/bash\ntrap "exit 1" USR1\necho "$@"\nfor _ in $(seq "$NAPS"); do sleep 0.05; done\nexit "$STATUS"\n'


@pytest.fixture
def job(tmp_path):
    """(function that starts the script as Slurm would, file with scontrol's calls)."""
    for name, content in (("srun", SRUN), ("scontrol", SCONTROL), ("torchrun", TORCHRUN)):
        (tmp_path / name).write_text(content)
        (tmp_path / name).chmod(0o755)

    def start(*arguments: str, **variables: str) -> subprocess.Popen:
        slurm = {"JOB_ID": "64123", "JOB_NODELIST": "localhost", "JOB_NUM_NODES": "1", "GPUS_ON_NODE": "2"}
        own = {"TORCHRUN": f"{tmp_path}/torchrun", "QUEUE": f"{tmp_path}/queue", "STATUS": "0"}
        own |= {f"SLURM_{name}": value for name, value in slurm.items()} | variables
        environment = os.environ | own | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        script = ["bash", "scripts/slurm.sbatch", *arguments]
        return subprocess.Popen(script, cwd=REPOSITORY, env=environment, **streams)

    return start, tmp_path / "queue"


def test_a_job_that_is_warned_goes_back_into_the_queue(job, tmp_path):
    start, queue = job
    process = start(f"run_dir={tmp_path}", "data.root=a folder", NAPS="2400", SLURM_CPUS_PER_TASK="24")
    of_srun = [process.stdout.readline().strip() for _ in range(2)]
    assert of_srun == ["--kill-on-bad-exit=0", "--cpus-per-task=24"]
    started = process.stdout.readline()
    assert "--nnodes=1 --nproc-per-node=2 --rdzv-backend=c10d --rdzv-endpoint=localhost:24123" in started
    assert started.endswith(f"train_seg.py resume=auto run_dir={tmp_path} data.root=a folder\n")
    process.send_signal(signal.SIGUSR1)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1 and "back into the queue, to continue" in output
    assert queue.read_text() == "requeue 64123\n"


def test_a_job_that_ends_or_fails_by_itself_does_not(job, tmp_path):
    """A job that is refused because its folder is not fixed does not either."""
    start, queue = job
    for status in (0, 3):
        process = start(f"run_dir={tmp_path}", STATUS=str(status), NAPS="1")
        process.communicate(timeout=60)
        assert process.returncode == status and not queue.exists()
    process = start("experiment=camvid/resnext_small")
    assert "error: give run_dir=RUN_DIR" in process.communicate(timeout=60)[0] and process.returncode == 2
