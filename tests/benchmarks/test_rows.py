"""Tables of what was measured in turns."""

import pytest

from benchmarks.rows import compared, medians

pytestmark = pytest.mark.slow

ITEMS = [
    [
        {"way": "old", "peak_bytes": 2**21, "times_ms": [2.0, 4.0], "names": ["a", "b|"]},
        {"way": "new", "peak_bytes": 2**20, "times_ms": [1.0, 8.0], "names": []},
        {"way": "bad", "reason": "failed"},
    ],
    [{"way": "new", "peak_bytes": 2**20, "times_ms": [3.0]}, {"way": "old", "peak_bytes": 2**20, "times_ms": [2.0]}],
    [{"way": "new", "peak_bytes": None, "times_ms": [0.1234567]}],
]


def test_rows_are_relative_to_a_row_of_their_item():
    assert compared(ITEMS, "way", "old").splitlines() == [
        "| way | peak, MiB | / old | times, ms | / old | names |",
        "|---|---:|---:|---:|---:|---:|",
        "| old | 2.00 | 1 | 3 | 1 | a b\\| |",
        "| new | 1.00 | 0.50 | 4.5 | 1.25 (0.88 – 1.62) |  |",
        "| new | 1.00 | 1.00 | 3 | 1.50 |  |",
        "| old | 1.00 | 1 | 2 | 1 |  |",
        "| new |  |  | 0.1235 |  |  |",
    ]


def test_medians_are_of_the_items_that_have_both():
    assert medians(ITEMS, "way", "old").splitlines() == [
        "| way | items | peak / old | times / old |",
        "|---|---:|---:|---:|",
        "| new | 2 | 0.75 (0.50 – 1.00) | 1.38 (1.25 – 1.50) |",
    ]
