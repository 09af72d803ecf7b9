"""All tests here compare what a repetition computes with the first run."""

import pytest

from keepless import checking_repetitions


@pytest.fixture(autouse=True)
def checks():
    with checking_repetitions():
        yield
