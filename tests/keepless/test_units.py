"""Numbers of bytes as text."""

import pytest

from keepless.units import bytes_of


@pytest.mark.parametrize(
    "text, expected", [("12GiB", 12 * 2**30), (" 1.5 MiB", 3 * 2**19), ("2GB", 2 * 10**9), ("6", None)]
)
def test_units(text, expected):
    assert bytes_of(text) == expected
