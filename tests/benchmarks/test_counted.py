"""Bytes and plans that are counted: the committed ones are what the code gives today."""

import json

import pytest
from torch import nn

from benchmarks import counted, frame, memory_plan, reversible
from benchmarks.frame import RESULTS, rows_of
from engine.schema.memory import Memory
from models.pooling import MaxPool2d
from scripts.reports import papers
from tests.benchmarks.records import measured
from tests.norms import STRATEGIES

pytestmark = pytest.mark.slow("measures: minutes in all")


def recorded(name: str, part: str) -> list[dict]:
    calls = json.loads((RESULTS / f"{name}.json").read_text())["calls"]
    return [row for call in calls for row in rows_of(call) if row["part"] == part]


def test_every_saving_strategy_has_a_row():
    """The values in the rows are compared with the page in tests/test_docs.py."""
    assert STRATEGIES.keys() == counted.TITLES.keys()


@pytest.mark.parametrize("body, expected", [("ResNeXt-101", 1.96), ("WideResNet-38", 1.75)])
def test_with_pytorchs_pooling_the_share_equals_the_released_layers(body, expected, monkeypatch):
    monkeypatch.setattr(MaxPool2d, "forward", nn.MaxPool2d.forward)
    standard, inplace = (counted.bytes_per_pixel(norm, body) for norm in ("std", "inplace"))
    assert abs(standard / inplace - expected) < 0.005


PLANNED = {row["experiment"]: row for row in recorded("memory_plan", "experiments")}


def test_experiments_state_the_planned_memory():
    """One's own need not."""
    stated = {name: papers.paper_of(name).get("planned") for name in papers.all_experiments()}
    counted = {name: f"{row['peak'] / 2**30:.2f} GiB" for name, row in PLANNED.items()}
    differ = [name for name in {*stated, *counted} if stated.get(name) != counted.get(name)]
    advice = "leave `planned` out of one's own, and record the paper's: python -m benchmarks.memory_plan"
    assert not differ, f"{differ}: {advice}"
    assert all(row["devices"] == papers.devices_of(name) for name, row in PLANNED.items())


def test_the_plan_is_what_a_new_trace_gives(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in PLANNED:
        assert memory_plan.measure(memory_plan.PlanArguments(), "experiments", name) == [PLANNED[name]]
    (work,) = (row for row in recorded("memory_plan", "hours") if row["experiment"] == "table2/release_resnet34")
    assert memory_plan.measure(memory_plan.PlanArguments(), "hours", work["experiment"]) == [work]


def test_the_planner_is_calibrated_on_table_3():
    """Every row fits with the default keys, and none has room for many more pixels than the paper's."""
    available = Memory(budget="12GiB").available(device_count=4)
    rows = {(row["column"], row["fit"], row["norm"]): row for row in recorded("memory_plan", "fits")}
    assert len(rows) == 16
    for (column, fit, norm), row in rows.items():
        assert PLANNED[memory_plan.experiment_of(column, fit, norm)]["peak"] <= available, (column, fit, norm)
        pixels = row["crops"] * row["crop_size"] ** 2
        standard = rows[column, fit, "std"]
        assert norm == "std" or pixels > 1.35 * standard["crops"] * standard["crop_size"] ** 2
        assert pixels < 1.43 * row["paper_crops"] * row["paper_crop_size"] ** 2, (column, fit, norm)


def test_revnets_table_1_counts_what_theory_says_and_the_page_shows_it(in_process, monkeypatch, tmp_path):
    monkeypatch.setattr(reversible, "DEPTHS", (2, 8))
    call, text = measured("reversible", tmp_path, "only=[depths]")
    assert "| 8 | recursive |" in text
    rows = {(row["units"], row["method"]): row for row in rows_of(call, "depths")}
    state = 4 * 32 * 16 * 16 * 4  # bytes of a unit's output
    assert rows[8, "reversible"]["kept_bytes"] == rows[2, "reversible"]["kept_bytes"] == state
    assert rows[8, "blocks"]["kept_bytes"] == 8 * state
    assert rows[8, "sqrt"]["kept_bytes"] == 3 * state  # segments of 3, 3 and 2 units
    assert rows[8, "recursive"]["kept_bytes"] == 2 * state and rows[8, "naive"]["kept_bytes"] > 12 * state
    naive = rows[8, "naive"]["flops"]
    assert rows[8, "reversible"]["flops"] == pytest.approx(4 / 3 * naive)
    assert rows[8, "recursive"]["flops"] > rows[8, "sqrt"]["flops"] > rows[8, "blocks"]["flops"] > naive
    for units in (2, 8):
        peaks = {method: rows[units, method]["peak_bytes"] for method in reversible.METHODS}
        assert min(peaks, key=lambda method: peaks[method]) == "reversible"


def test_kept_bytes_of_reversible_networks_equal_the_record():
    """MemCNN's published table, counted again from the code as it is."""
    for title in reversible.PUBLISHED:
        (row,) = reversible.measure(frame.Arguments(), "activations", title)
        assert row in recorded("reversible", "activations")
