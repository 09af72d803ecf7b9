"""The layers' benchmark: its picture. tests/test_docs.py makes its page again from the record."""

from scripts.evidence import layers
from scripts.evidence.layers import COMPILED, INPLACE_2, STANDARD


def test_the_picture_compares_captured_steps_if_there_are_some():
    row = {"group": "bn_act_conv", "shape": "CONV1", "size": [2, 8, 4, 4], "layout": "contiguous", "dtype": "float32"}
    row |= {"backend": "eager", "saved_bytes": 2**20, "peak_bytes": 2**20, "times_ms": [2.0]}
    rows = [
        row | {"strategy": STANDARD, "captured_ms": [1.0]},
        row | {"strategy": INPLACE_2, "captured_ms": [0.5]},
        row | {"strategy": COMPILED},  # its capture failed
    ]
    (axes,) = layers.picture({"items": {"x": rows}}).axes
    assert [bar.get_height() for bar in axes.patches] == [1.0, 0.5] and "CUDA graph" in axes.get_ylabel()
