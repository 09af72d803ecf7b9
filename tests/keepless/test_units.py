"""Numbers of bytes and shares as text."""

import pytest

from keepless.units import bytes_of, share_of, size_text

SIZES = {
    "12GiB": 12 * 2**30,
    " 1.5 MiB": 3 * 2**19,
    "2GB": 2 * 10**9,
    "900 KB": 900_000,
    "1TiB": 2**40,
    "8gb": 8 * 10**9,
    "12 gib": 12 * 2**30,
    "6": None,
    "12G": None,  # GB or GiB?
    "50%": None,
}
SHARES = {"50%": 0.5, "12.5 %": 0.125, "0.5": 0.5, ".25": 0.25, "1.0": 1.0, "1": None, "-0.5": None, "6GiB": None}


@pytest.mark.parametrize("text, expected", SIZES.items())
def test_units(text, expected):
    assert bytes_of(text) == expected


@pytest.mark.parametrize("text, expected", SHARES.items())
def test_shares(text, expected):
    assert share_of(text) == expected


@pytest.mark.parametrize(
    "count, expected",
    [
        (2**30, "1.00 GiB"),
        (2**30 - 1, "1024.0 MiB"),
        (3 * 2**29, "1.50 GiB"),
        (2**20, "1.0 MiB"),
        (2**20 - 1, "1024.0 KiB"),
        (512, "0.5 KiB"),
    ],
)
def test_sizes_as_text(count, expected):
    assert size_text(count) == expected
