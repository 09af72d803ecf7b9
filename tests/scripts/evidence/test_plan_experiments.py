"""The plan of the papers' experiments, against their files and new traces."""

import json
import re

import pytest

from scripts.evidence import papers, plan_experiments
from scripts.evidence.plan_experiments import crops_on
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


def test_table_3_is_redrawn():
    """In-place norms add what the paper says or more, and each choice is the most that the budget allows."""
    budget = 12 * 2**30 - RECORD["reserved"]
    rows = {(row["column"], row["fit"], row["norm"]): row for row in RECORD["fits"]}
    assert len(rows) == 16
    for (column, fit, norm), row in rows.items():
        more_than_paper = (row["crops"], row["crop_size"]) > (row["paper_crops"], row["paper_crop_size"])
        assert (row["larger_peak"] <= budget) == more_than_paper, (column, fit, norm)
        pixels = row["crops"] * row["crop_size"] ** 2
        standard = rows[column, fit, "std"]
        assert norm == "std" or pixels > 1.35 * standard["crops"] * standard["crop_size"] ** 2


def test_memory_is_linear_in_crops():
    assert all(abs(row["error"]) <= 0.02 for row in RECORD["cards"])
    line = {"base": 10**9, "each": 10**9}
    for gigabytes, crops in ((1, 0), (2, 0), (3, 1), (3.999, 1), (4, 2)):
        assert crops_on(line, gigabytes, reserved=10**9) == crops
