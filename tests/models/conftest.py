"""For tests of reversible networks."""

import pytest

from keepless import checking_repetitions


@pytest.fixture
def checks():
    """Compare what a repetition computes with the first run."""
    with checking_repetitions():
        yield
