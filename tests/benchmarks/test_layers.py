"""The layers' benchmark: its picture."""

import pytest

from benchmarks import layers
from benchmarks.layers import STANDARD, TITLES

pytestmark = pytest.mark.slow


def test_the_picture_compares_captured_steps_if_there_are_some():
    row = {"shape": "CONV1 2x8x4x4", "layout": "contiguous", "dtype": "float32", "times_ms": [2.0]}
    rows = [
        row | {"strategy": STANDARD, "captured_ms": [1.0]},
        row | {"strategy": TITLES["inplace"], "captured_ms": [0.5]},
        row | {"strategy": "standard, compiled", "not captured": "failed: RuntimeError: synchronises"},
    ]
    (axes,) = layers.picture({"items": {"x": rows}}).axes
    assert [bar.get_height() for bar in axes.patches] == [1.0, 0.5] and "CUDA graph" in axes.get_ylabel()
    assert [text.get_text() for text in axes.texts] == ["1.00", "0.50"]
