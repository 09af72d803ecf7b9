"""Reads that never end: FIFOs, and network folders whose server is gone."""

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from datasets import time_limit
from datasets.reading import decode_photograph
from datasets.time_limit import limited, reading_limit
from tests.mounts import needs_mounts


@pytest.fixture
def fifo(tmp_path) -> Path:
    """A file that blocks whoever opens it."""
    os.mkfifo(tmp_path / "fifo")
    return tmp_path / "fifo"


def seconds_left() -> float:
    """Until the running read is interrupted; 0 without a limit."""
    return signal.getitimer(signal.ITIMER_REAL)[0]


def test_a_read_that_takes_too_long_is_named_and_no_reader_takes_it_for_a_damaged_file(fifo):
    """OSError would be one, and TimeoutError is an OSError."""
    with pytest.raises(TimeoutError, match=f"^{fifo}: too late$"), reading_limit(0.1, "too late"), limited(fifo):
        open(fifo)
    with pytest.raises(TimeoutError, match="^too late$"), reading_limit(0.1, "too late"), limited():
        decode_photograph(fifo)


def test_only_reads_are_limited_and_in_the_main_thread_alone():
    """Python handles signals there."""
    with limited():
        assert seconds_left() == 0  # without a `reading_limit`
    with reading_limit(600, "too late"):
        assert seconds_left() == 0
        with limited():
            assert 0 < seconds_left() <= 600
        assert seconds_left() == 0

    def read() -> float:
        with reading_limit(600, "too late"), limited():
            return seconds_left()

    with reading_limit(600, "too late"), ThreadPoolExecutor(1) as pool:
        assert pool.submit(read).result() == 0


def test_the_outer_of_two_reads_is_limited_and_an_outer_limit_holds_again_after_an_inner(fifo):
    with pytest.raises(TimeoutError, match="^too late$"), reading_limit(0.1, "too late"), limited():
        with limited(fifo):
            pass
        open(fifo)
    with pytest.raises(TimeoutError, match="^outer$"), reading_limit(0.1, "outer"):
        with reading_limit(60, "inner"), limited():
            pass
        with limited():
            open(fifo)


DEAD = """
import sys
from pathlib import Path
from datasets import time_limit
from tests.mounts import mount_dead
time_limit.GRACE_SECONDS = 0.5
folder = Path(sys.argv[1])
mount_dead(folder)
with time_limit.reading_limit(0.5, "too late"), time_limit.limited(folder):
    folder.is_dir()
"""


@needs_mounts
def test_a_process_that_a_dead_network_folder_holds_says_so_and_ends(tmp_path):
    """No signal but SIGKILL reaches it."""
    done = subprocess.run([sys.executable, "-c", DEAD, str(tmp_path)], capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stderr) == (1, f"error: {tmp_path}: too late\n")
    assert time_limit.GRACE_SECONDS > 1
