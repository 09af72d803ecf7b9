"""The README's picture of the demo."""

import json

import numpy as np
import pytest
from PIL import Image

from scripts.evidence.demo_picture import draw, figure
from tests.runs import composed


def test_the_legend_has_every_scored_class_in_its_colour():
    drawn = figure([np.zeros((4, 12, 3), np.uint8)] * 2, {"road": 0.5, "car": 0.25})
    (legend,) = drawn.legends
    assert [text.get_text() for text in legend.get_texts()] == ["road 50%", "car 25%"]
    assert [tuple(round(255 * x) for x in patch.get_facecolor()[:3]) for patch in legend.get_patches()] == [
        (128, 64, 128),
        (0, 0, 142),
    ]


def test_overlays_of_the_run_are_needed(tmp_path):
    (tmp_path / "results.json").write_text(json.dumps({"iou": {"road": 0.5, "rider": None}}))
    values = composed("demo_picture", f"run_dir={tmp_path}", "images=[0]", f"out={tmp_path / 'out.png'}")
    with pytest.raises(ValueError, match="000000.png does not exist: evaluate with overlays="):
        draw(values)
    (tmp_path / "overlays").mkdir()
    Image.new("RGB", (12, 4)).save(tmp_path / "overlays" / "sketchheim_000000_000000.png")
    assert Image.open(draw(values)).width > 500
