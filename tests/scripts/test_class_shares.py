"""The figures of class shares: the script measures the committed numbers again."""

import json
from pathlib import Path

import pytest

from scripts.class_shares import compare, figure
from tests.runs import REPOSITORY, composed

OF_CAMVID = REPOSITORY / "docs" / "results" / "class_shares_camvid.json"
OF_DRAWN_STREETS = Path(__file__).with_name("class_shares_synthetic.json")  # written by the script


def shares(result: dict, sampling: str) -> list[float]:
    seen = result[sampling]
    pixels, crops = sum(seen["pixels"]), result["crops"]
    return [count / pixels for count in seen["pixels"]] + [count / crops for count in seen["crops"]]


@pytest.mark.slow
def test_the_numbers_of_the_drawn_streets_are_measured_again(tmp_path):
    """Within a tolerance: another version of OpenCV draws and scales differently."""
    committed = json.loads(OF_DRAWN_STREETS.read_text())
    measured = compare(composed("class_shares", f"out={tmp_path / 'again'}", "data.workers=1"))
    assert json.loads((tmp_path / "again.json").read_text()) == measured
    assert (tmp_path / "again.png").stat().st_size > 10_000
    for sampling in ("uniform", "class_uniform"):
        assert shares(measured, sampling) == pytest.approx(shares(committed, sampling), abs=2e-3)
    assert {**measured, **committed}.keys() == measured.keys() == committed.keys()


def test_the_figure_shows_the_committed_numbers():
    """Class-uniform sampling shows the rarest class more often."""
    result = json.loads(OF_CAMVID.read_text())
    drawn = [class_id for class_id, pixels in enumerate(result["pixels_in_images"]) if pixels]
    pixels, crops = figure(result).axes
    labels = [label.get_text() for label in pixels.get_xticklabels()]
    assert sorted(labels) == sorted(result["classes"][class_id] for class_id in drawn)
    for axes, quantity, total in ((pixels, "pixels", None), (crops, "crops", result["crops"])):
        for bars, sampling in zip(axes.containers, ("uniform", "class_uniform"), strict=True):
            counts = dict(zip(result["classes"], result[sampling][quantity], strict=True))
            expected = [100 * counts[label] / (total or sum(counts.values())) for label in labels]
            assert [bar.get_height() for bar in bars] == pytest.approx(expected)
    assert OF_CAMVID.with_suffix(".png").is_file()
    rarest = min(drawn, key=lambda class_id: result["pixels_in_images"][class_id])
    for quantity in ("pixels", "crops"):
        assert result["class_uniform"][quantity][rarest] > result["uniform"][quantity][rarest]
