"""The undisturbed runs that the others are compared with."""

import functools

import pytest

from tests.faults.runs import finished


@pytest.fixture(scope="session")
def whole_of(tmp_path_factory):
    """A function of an entry, overrides and a number of processes: the folder of their uninterrupted run."""

    @functools.cache
    def whole(entry: str, *overrides: str, processes: int = 1):
        run_dir = tmp_path_factory.mktemp("whole") / "run"
        finished(run_dir, *overrides, entry=entry, processes=processes)
        return run_dir

    return whole
