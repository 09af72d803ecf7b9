"""The table of scores that users read."""

import io
import re

from rich.console import Console

from engine.segmentation.score_table import iou_table


def table_lines(scores: dict) -> list[list[str]]:
    """The words of each line of the table, without its frame."""
    console = Console(file=io.StringIO(), width=80)
    console.print(iou_table(scores))
    lines = console.file.getvalue().splitlines()
    return [words for line in lines if (words := [cell.strip() for cell in re.split("[│┃]", line) if cell.strip()])]


def test_official_scores_stand_beside_the_papers():
    paper = {"miou": 0.5, "iou": {"road": 0.5, "car": None}, "pixel_accuracy": 0.75}
    lines = table_lines({**paper, "official": {}})
    assert ["class", "IoU %"] in lines and ["mean (mIoU)", "50.00"] in lines and ["car", "–"] in lines
    lines = table_lines({**paper, "official": {"miou": 0.25, "iou": {"road": 0.25, "car": 0.5, "other": 0.0}}})
    assert ["class", "IoU %", "official %"] in lines and ["mean (mIoU)", "50.00", "25.00"] in lines
    assert ["car", "–", "50.00"] in lines and ["other", "0.00"] in lines
    official = {"miou": 0.5, "iiou": {"car": 0.125}, "mean_iiou": 0.125, "mean_category_iou": 0.5}
    official |= {"category_iou": {"flat": 0.5, "vehicle": None}, "category_iiou": {"vehicle": 0.2}}
    official["mean_category_iiou"] = 0.2
    lines = table_lines({**paper, "official": official})
    assert ["mean (mIoU)", "50.00", "12.50"] in lines and ["car", "–", "12.50"] in lines
    assert ["flat", "50.00"] in lines and ["vehicle", "–", "20.00"] in lines
    assert not any("instanceIds" in line[0] for line in lines)
    lines = table_lines({**paper, "official": {**official, "iiou": {"car": None}, "mean_iiou": None}})
    assert ["class", "IoU %"] in lines and ["mean (mIoU)", "50.00"] in lines and ["flat", "50.00"] in lines
    assert any("instanceIds" in line[0] for line in lines)
