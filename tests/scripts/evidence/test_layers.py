"""The layers' benchmark: what it counts and compares. No test asserts a time."""

import pytest
import torch

from scripts.evidence import layers, strategies
from scripts.evidence.layers import comparison
from scripts.evidence.strategies import BUDGET, COMPILED, COPY, HOST, INPLACE_2, PACKAGE, STANDARD, SYNC, Cell, Work
from scripts.reports.markdown import grouped
from scripts.reports.measuring import peak_bytes
from tests.scripts.evidence.records import measured

EAGER = f"{INPLACE_2}, eager backend"
OURS = {*strategies.OURS.values()}
TINY = ("batch=2", "channels=[8]", "pixels=[4]", "large=false", "rounds=2", "sample_ms=0.1", "threads=1")


@pytest.fixture(autouse=True, scope="module")
def no_compiled_backend():
    """It takes seconds to compile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strategies, "BACKENDS", ("auto", "eager"))
        yield


def test_every_strategy_has_a_row_with_its_bytes(in_process, tmp_path):
    """A whole run, with a compiler that takes no time."""
    call, text = measured(
        "layers", tmp_path, "groups=[bn_act,bn_act_conv]", "compiler=aot_eager", "backend=eager", *TINY
    )
    groups = grouped(layers.frame.rows_of(call), ("group", "layout"), "strategy")
    assert len(groups) == 4 and not torch.distributed.is_initialized()
    for layout in layers.LAYOUTS:
        rows = groups[f"bn_act_conv, {layout}"]
        assert {STANDARD, *OURS, SYNC, COMPILED, BUDGET, COPY} <= rows.keys()
        kept = {name: layers._buffers(row) for name, row in rows.items() if name != COPY}
        assert kept == dict.fromkeys(kept, 1) | {STANDARD: 2, COMPILED: 3}  # this compiler keeps y as well
        for name in kept:
            assert 0 < rows[name]["saved_vector_bytes"] <= 8 * 8 * 4
            assert rows[name]["peak_bytes"] > rows[name]["input_bytes"] == 2 * 8 * 4 * 4 * 4
    rows = groups["bn_act, contiguous"]
    assert {STANDARD, *OURS, SYNC, COMPILED, EAGER, COPY} <= rows.keys() and BUDGET not in rows
    assert rows[EAGER]["backend"] == rows[STANDARD]["backend"] == "eager" and rows[COMPILED]["backend"] == "aot_eager"
    assert text.count(f"| {INPLACE_2} |") == 5  # in the summary and in four tables
    assert "record.png" in text and "Longer: " in text


def test_the_network_is_measured_whole_and_host_time_of_tiny_inputs_without_bytes(monkeypatch):
    monkeypatch.setattr(strategies, "NETWORK_IMAGES", (2, 3, 32, 32))
    own = {"compiler": None, "backend": "eager", "rounds": 1, "sample_ms": 0.1}
    arguments = layers.LayersArguments(groups=["network", *HOST], **own).suited()
    network, *hosts = (layers.measure(arguments, *item) for item in layers.items(arguments).values())
    rows = {row["strategy"]: row for row in network if "reason" not in row}
    assert rows.keys() == {STANDARD, *OURS}
    assert rows[INPLACE_2]["saved_bytes"] < 0.65 * rows[STANDARD]["saved_bytes"]
    reasons = {row["strategy"]: row["reason"] for row in network if "reason" in row}
    assert reasons == dict.fromkeys((COMPILED, BUDGET, strategies.INPLACE_COMPILED), "compiler=null")
    for host in hosts:
        assert {row["strategy"] for row in host} == {STANDARD, strategies.ONE_LAYER, *OURS, strategies.WITHOUT_LAUNCHES}
        assert all(row["input_bytes"] == 8192 and row["saved_bytes"] is None for row in host)
    # Inference has no backward pass.
    cell = Cell("host_eval", "TINY", (2, 8, 4, 4), "contiguous", "float32", "cpu")
    block = cell.block(torch.nn.BatchNorm2d)
    (output,) = Work(block, block, cell.tensor(cell.size).requires_grad_(), cell.tensor(cell.size)).step()
    assert not output.requires_grad and torch.equal(block[0].running_mean, torch.zeros(8))


def test_a_step_returns_all_gradients_and_an_owned_input_is_freed():
    cell = Cell("bn_act_conv", "CONV1", (2, 8, 4, 4), "channels_last", "float32", "cpu")
    block = cell.block(torch.nn.BatchNorm2d)
    work = Work(block, block, cell.tensor(cell.size).requires_grad_(), cell.tensor((2, 4, 4, 4)))
    expected = torch.autograd.grad(block(work.x), [work.x, *block.parameters()], work.dz)
    assert len(expected) == 4
    for gradients in (work.step(), work.owning_step()):
        torch.testing.assert_close(gradients, expected)
    assert work.x.is_contiguous(memory_format=torch.channels_last)
    # A sigmoid keeps its output only: input and output live together, then output and gradient.
    sigmoid, x = torch.nn.Sigmoid(), torch.randn(1000, requires_grad=True)
    assert peak_bytes(Work(sigmoid, sigmoid, x, torch.ones(1000)).owning_step, "cpu") == 2 * 1000 * 4


def test_the_page_says_where_in_place_norms_are_ahead_and_where_behind():
    """Medians within rounds; the package is not charged for its copy."""

    def cell(group: str, shape: str, times_ms: dict[str, float]) -> dict[str, dict]:
        known = {"group": group, "shape": shape, "layout": "contiguous", "dtype": "float32", "saved_bytes": 100}
        return {name: {**known, "times_ms": [ms, 2 * ms, 4 * ms]} for name, ms in times_ms.items()}

    cells = [
        cell("bn_act", "CONV1", {STANDARD: 1.0, INPLACE_2: 0.7, PACKAGE: 3.9, COPY: 0.4}),
        cell("bn_act", "CONV2", {STANDARD: 1.0, INPLACE_2: 1.2}),
        cell("bn_act_conv", "CONV1", {STANDARD: 1.0, **dict.fromkeys(OURS, 1.01)}),
        cell("network", "NETWORK", {STANDARD: 2.0, COMPILED: 1.0, strategies.INPLACE_COMPILED: 0.85}),
    ]
    text = comparison(cells)
    assert "- BN + ACT: 0.70 – 1.20 of standard's time. Longer: CONV2 contiguous float32 (1.20).\n" in text
    assert "- BN + ACT: 0.20 of the released package's time, without" in text
    assert "medians: in-place II +1.0 %, in-place I +1.0 %, checkpointing (c) +1.0 %, checkpointing (b) +1.0 %." in text
    assert "- Small whole network, both compiled: 0.85 of standard's time, 1.000 of its bytes." in text
    assert comparison([]) == ""
