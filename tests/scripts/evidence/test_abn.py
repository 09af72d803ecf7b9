"""The layers' benchmark: what it counts and compares. No test asserts a time."""

import pytest
import torch

from scripts.evidence import abn
from scripts.evidence import abn_strategies as strategies
from scripts.evidence.abn_page import comparison, pictures
from scripts.evidence.abn_strategies import BUDGET, COMPILED, COPY, INPLACE_2, PACKAGE, STANDARD, SYNC, Cell, Work
from scripts.evidence.frame import Clock
from scripts.evidence.measuring import peak_bytes
from tests.scripts.evidence.records import measured

EAGER = f"{INPLACE_2}, eager backend"
OURS = (strategies.CHECKPOINTING_B, strategies.CHECKPOINTING_C, strategies.INPLACE_1, INPLACE_2)
TINY = {"batch": 2, "channels": [8], "pixels": [4], "large": False, "rounds": 2, "sample_ms": 0.1}


@pytest.fixture(autouse=True, scope="module")
def no_compiled_backend():
    """It takes seconds to compile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strategies, "BACKENDS", ("auto", "eager"))
        yield


def measure(**options: object) -> dict:
    """The results on tensors of 1 KiB, by default of BN + ACT in one layout."""
    chosen = {**TINY, "groups": ["bn_act"], "layouts": ["contiguous"], **options}
    return abn.measure(abn.AbnArguments(**chosen), Clock())


@pytest.fixture(scope="module")
def record(tmp_path_factory, no_compiled_backend) -> tuple[dict, str]:
    """A whole run, with a compiler that takes no time."""
    options = ["groups=[bn_act,bn_act_conv]", "compiler=aot_eager", "backend=eager"]
    options += [f"{key}={value}" for key, value in TINY.items()]
    return measured("abn", abn.run, tmp_path_factory.mktemp("benchmark"), *options)


def rows_of(result: dict, group: str, layout: str) -> dict[str, dict]:
    return {row["strategy"]: row for row in result["rows"] if (row["group"], row["layout"]) == (group, layout)}


@pytest.mark.parametrize("layout", abn.LAYOUTS)
def test_every_strategy_has_a_row_with_its_bytes(record, layout):
    rows = rows_of(record[0], "bn_act_conv", layout)
    assert {STANDARD, *OURS, SYNC, COMPILED, BUDGET, COPY} <= rows.keys()
    buffers = {name: row["saved_buffers"] for name, row in rows.items()}
    assert all(buffers[name] == 1 for name in (*OURS, SYNC, BUDGET)), buffers
    assert buffers[STANDARD] == 2 and buffers[COMPILED] == 3  # the compiler of these tests keeps y as well
    for name, row in rows.items():
        assert len(row["times_ms"]) == TINY["rounds"] and row["median_ms"] > 0
        if name != COPY:
            assert row["saved_bytes"] == 2 * 8 * 4 * 4 * 4 * buffers[name] + row["saved_vector_bytes"]
            assert 0 < row["saved_vector_bytes"] <= 8 * 8 * 4
            assert row["peak_bytes"] > row["input_bytes"]


def test_alone_the_same_strategies_and_the_backends_and_all_in_the_page(record):
    rows = rows_of(record[0], "bn_act", "contiguous")
    assert {STANDARD, *OURS, SYNC, COMPILED, EAGER, COPY} <= rows.keys() and BUDGET not in rows
    assert rows[STANDARD]["ratio"] == 1
    assert rows[EAGER]["backend"] == rows[STANDARD]["backend"] == "eager" and rows[COMPILED]["backend"] == "aot_eager"
    assert record[1].count(f"| {INPLACE_2} |") == 5  # in the summary and in four tables
    assert record[1].count("- BN + ACT") == 2 and "Longer: " in record[1]


def test_the_network_is_measured_whole(monkeypatch):
    monkeypatch.setattr(abn, "NETWORK_IMAGES", (2, 3, 32, 32))
    result = measure(groups=["network"], compiler=None, backend="eager")
    rows = {row["strategy"]: row for row in result["rows"]}
    assert rows.keys() == {STANDARD, *OURS}
    assert rows[INPLACE_2]["saved_bytes"] < 0.65 * rows[STANDARD]["saved_bytes"]
    reasons = {entry["strategy"]: entry["reason"] for entry in result["left_out"]}
    assert reasons == dict.fromkeys((COMPILED, BUDGET, strategies.INPLACE_COMPILED), "compiler=null")
    assert not torch.distributed.is_initialized()


def test_host_time_is_of_tiny_inputs_and_without_bytes():
    result = measure(groups=list(strategies.HOST))
    for group in strategies.HOST:
        rows = rows_of(result, group, "contiguous")
        assert rows.keys() == {STANDARD, strategies.ONE_LAYER, *OURS, strategies.WITHOUT_LAUNCHES}
        assert all(row["input_bytes"] == 8192 and row["saved_bytes"] is None for row in rows.values())
    # Inference has no backward pass.
    cell = Cell("host_eval", "TINY", (2, 8, 4, 4), "contiguous", "float32", "cpu")
    block = cell.block(torch.nn.BatchNorm2d)
    (output,) = Work(block, block, cell.tensor(cell.size).requires_grad_(), cell.tensor(cell.size)).step()
    assert not output.requires_grad and torch.equal(block[0].running_mean, torch.zeros(8))


def test_cells_that_fail_or_do_not_fit_the_minutes_are_named(monkeypatch):
    def failing(*_):
        raise MemoryError("no room")

    monkeypatch.setattr(abn, "interleaved", failing)
    for options, reason in (({"minutes": 1e-9}, "out of time: minutes=1e-09"), ({}, "failed: MemoryError: no room")):
        result = measure(compiler=None, **options)
        assert result["left_out"] == [{"cell": "bn_act CONV1 contiguous float32", "strategy": "all", "reason": reason}]
        assert not pictures(result)


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
