"""The plan of the papers' experiments, against their files and new traces."""

import json
import re

import pytest

from engine.schema.memory import Memory
from scripts.evidence import plan_experiments
from scripts.evidence.plan_experiments import crops_on
from scripts.reports import papers
from tests.runs import REPOSITORY

RECORD = json.loads((REPOSITORY / "docs" / "results" / "memory_plan.json").read_text())
PLANNED = {row["experiment"]: row for row in RECORD["experiments"]}


def test_headers_state_the_planned_memory():
    assert PLANNED.keys() == papers.all_experiments().keys()
    for name, row in PLANNED.items():
        found = re.search(r"# Planned: ([\d.]+) GiB of tensors on (one|each of (\d)) devices?\.", papers.header(name))
        assert found is not None and found[1] == f"{row['peak'] / 2**30:.2f}", name
        assert int(found[3] or 1) == row["devices"] == papers.devices_of(name), name


@pytest.mark.parametrize(
    "names", [["cifar10/resnet14"], pytest.param(list(PLANNED), marks=pytest.mark.slow)], ids=["one", "all"]
)
def test_the_plan_is_what_a_new_trace_gives(names, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in names:
        assert plan_experiments.planned(name) == PLANNED[name]


def test_the_planner_is_calibrated_on_table_3():
    """With the default keys every row fits, and none has room for more than the calibration's residuals."""
    available = Memory(budget="12GiB").available(devices=4)
    assert available == RECORD["available"]
    rows = {(row["column"], row["fit"], row["norm"]): row for row in RECORD["fits"]}
    assert len(rows) == 16
    for (column, fit, norm), row in rows.items():
        assert row["paper_peak"] <= available, (column, fit, norm)
        more_than_paper = (row["crops"], row["crop_size"]) > (row["paper_crops"], row["paper_crop_size"])
        assert (row["larger_peak"] <= available) == more_than_paper, (column, fit, norm)
        pixels = row["crops"] * row["crop_size"] ** 2
        standard = rows[column, fit, "std"]
        assert norm == "std" or pixels > 1.35 * standard["crops"] * standard["crop_size"] ** 2
        assert pixels < 1.43 * row["paper_crops"] * row["paper_crop_size"] ** 2, (column, fit, norm)


def test_memory_is_linear_in_crops():
    for row in RECORD["cards"]:  # within a budget, plans are discrete
        assert abs(row["error"]) <= (0.088 if "=budget" in row["combination"] else 0.017), row
    line = {"base": 10**9, "each": 10**9}
    for gigabytes, crops in ((0.5, 0), (1, 0), (2, 1), (2.999, 1), (3, 2)):
        assert crops_on(line, gigabytes) == crops
