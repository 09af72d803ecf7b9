"""The undisturbed run that the others are compared with."""

import pytest

from tests.faults.runs import complete


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """The folder of an uninterrupted run with `OPTIONS`."""
    return complete(tmp_path_factory.mktemp("whole") / "run")
