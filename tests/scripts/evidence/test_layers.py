"""The layers' benchmark: what it counts and compares. No test asserts a time."""

import pytest

from scripts.evidence import layers
from scripts.evidence.layers import COMPILED, INPLACE_2, OURS, STANDARD


def test_the_page_has_the_overhead_of_the_papers_strategies():
    known = {"group": "bn_act_conv", "shape": "CONV1", "layout": "contiguous", "dtype": "float32", "saved_bytes": 100}
    times = {STANDARD: 1.0, **dict.fromkeys(OURS.values(), 1.01)}
    cell = {name: {**known, "times_ms": [ms, 2 * ms, 4 * ms]} for name, ms in times.items()}
    text = layers.overheads([cell])
    assert "medians: in-place II +1.0 %, in-place I +1.0 %, checkpointing (c) +1.0 %, checkpointing (b) +1.0 %." in text
    assert layers.overheads([]) == "" and "CUDA graphs" not in text
    graphs = {name: row | {"captured_ms": [1.0 if name == STANDARD else 0.97] * 3} for name, row in cell.items()}
    assert "As CUDA graphs: in-place II -3.0 %, in-place I -3.0 %" in layers.overheads([graphs])


def test_steps_are_captured_on_a_device_alone_and_compared_with_captured_ones(tmp_path):
    row = {"group": "bn_act", "shape": "CONV1", "size": [2, 8, 4, 4], "layout": "contiguous", "dtype": "float32"}
    row |= {"backend": "eager", "saved_bytes": 2**20, "peak_bytes": 2**20, "times_ms": [2.0]}
    rows = [
        row | {"strategy": STANDARD, "captured_ms": [1.0]},
        row | {"strategy": INPLACE_2, "captured_ms": [0.5]},
        row | {"strategy": COMPILED},  # its capture failed
    ]
    page = "\n".join(layers.sections({"items": {"x": rows}}, ""))
    assert "| strategy | backend | ms | / standard | captured ms | / standard | saved MiB |" in page
    assert f"|  | {INPLACE_2} | eager | 2.000 | 1.00 (1.00 – 1.00) | 0.500 | 0.50 (0.50 – 0.50) | 1.00 | 1.00 |" in page
    assert f"|  | {COMPILED} | eager | 2.000 | 1.00 (1.00 – 1.00) |  |  | 1.00 | 1.00 |" in page
    (axes,) = layers.picture({"items": {"x": rows}}).axes
    assert [bar.get_height() for bar in axes.patches] == [1.0, 0.5] and "CUDA graph" in axes.get_ylabel()
    with pytest.raises(ValueError, match="captured=true needs device=cuda: device=cpu has no CUDA graphs"):
        layers.LayersArguments(out=f"{tmp_path}/x.json", captured=True).check()
