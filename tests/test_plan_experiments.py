"""The plan of the papers' experiments, against their files and new traces."""

import json
import re

import pytest

from scripts import papers, plan_experiments
from scripts.plan_experiments_page import crops_on
from tests.runs import REPOSITORY

RECORD = json.loads((REPOSITORY / "docs" / "results" / "memory_plan.json").read_text())
PLANNED = {row["experiment"]: row for row in RECORD["experiments"]}


@pytest.mark.parametrize("name", papers.all_experiments())
def test_headers_state_the_planned_memory(name):
    found = re.search(r"# Planned: ([\d.]+) GiB of tensors on (one device|each of (\d) devices)\.", papers.header(name))
    row = PLANNED[name]
    assert found is not None and found[1] == f"{row['peak'] / 2**30:.2f}"
    assert int(found[3] or 1) == row["devices"] == papers.devices_of(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", papers.all_experiments())
def test_the_plan_is_what_a_new_trace_gives(name, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
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


def test_the_table_in_the_documentation_is_the_plan_s():
    page = (REPOSITORY / "docs" / "results" / "memory_plan.md").read_text()
    text = (REPOSITORY / "docs" / "memory.md").read_text()
    section = text[text.index("## What fits on your device") : text.index("## Precision")]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    assert len(rows) == 8 and set(rows) <= set(page.splitlines())


def test_memory_is_linear_in_crops():
    assert all(abs(row["error"]) <= 0.02 for row in RECORD["cards"])


@pytest.mark.parametrize("gigabytes, crops", [(1, 0), (2, 0), (3, 1), (3.999, 1), (4, 2)])
def test_crops_on_a_device(gigabytes, crops):
    assert crops_on({"base": 10**9, "each": 10**9}, gigabytes, reserved=10**9) == crops
