"""The benchmark of the loss: every way gives the same gradient."""

import torch

from scripts.evidence import loss
from scripts.evidence.loss import BOOTSTRAPPED, COMPILED, CROSS_ENTROPY, EACH_CROP, PLAIN, TILES, run, ways_of
from tests.scripts.evidence.records import measured

TINY = ["classes=[5]", "strides=[8]", "crop_size=32", "rounds=2"]


def test_a_tiny_run_compares_every_way(monkeypatch, tmp_path):
    monkeypatch.setattr(torch, "compile", lambda module, **_: module)  # which takes a minute
    result, text = measured("loss", run, tmp_path, *TINY)
    assert [(row["loss"], row["way"]) for row in result["rows"]] == [
        (name, way) for name in (CROSS_ENTROPY, BOOTSTRAPPED) for way in (TILES, PLAIN, COMPILED, EACH_CROP)
    ]
    assert all(len(row["times_ms"]) == 2 and row["peak_bytes"] > 0 for row in result["rows"])
    assert all(row["error"] < 1e-5 for row in result["rows"])
    assert f"python -m scripts.evidence.loss {TINY[0]}" in text and "record.png" in text
    assert set(loss.COLOURS) == set(ways_of(CROSS_ENTROPY))
