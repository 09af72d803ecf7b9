"""Runs that nothing happens to, beside which the others are held."""

import pytest

from tests.faults.runs import complete


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """The folder of the run with `OPTIONS`, uninterrupted."""
    return complete(tmp_path_factory.mktemp("whole") / "run")
