"""A run of `make mutants`, whose tests lie in one file: the second worker has none."""

import subprocess
import sys

import pytest

from tools.mutants import REPOSITORY, WORKERS


@pytest.mark.slow
def test_mutants_of_a_file_are_killed_by_its_tests():
    options = ["count=4", "room=keepless/units.py", "tests=tests/keepless/test_units.py"]
    command = [sys.executable, "-m", "tools.mutants", *options]
    process = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=600)
    assert WORKERS > 1 and process.returncode == 0, process.stdout + process.stderr
    assert "; failed: []" in process.stdout and "of 4 mutants {'killed': 4}" in process.stdout, process.stdout
