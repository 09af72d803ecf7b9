"""All tests here compare what a repetition computes with the first run."""

import pytest


@pytest.fixture(autouse=True)
def always(checks):
    pass
