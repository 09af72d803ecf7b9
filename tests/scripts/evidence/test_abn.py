"""The layers' benchmark: what it counts, what it compares, how it judges. No test asserts a time."""

import math

import pytest
import torch

from scripts.evidence import abn
from scripts.evidence import abn_strategies as strategies
from scripts.evidence.abn_page import EAGER, PASS_IN_PART, SHOWN, pictures, targets
from scripts.evidence.abn_strategies import BUDGET, COMPILED, COPY, INPLACE_2, PACKAGE, STANDARD, SYNC, Cell, Work
from scripts.evidence.frame import MISS, NOT_MEASURED, PASS, Clock
from scripts.evidence.measuring import peak_bytes
from tests.scripts.evidence.records import measured

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
    saved = "saved bytes, BN+ACT+CONV, in-place II | 0.5 | 0.5 plus O(C), exactly | 0.5 plus 2 C floats, 2 of 2"
    assert saved in record[1]


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
        assert rows.keys() == {STANDARD, strategies.ONE_LAYER, *OURS}
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


def synthetic(group: str, size: list[int], times_ms: dict[str, float], **cell: str) -> list[dict]:
    """Rows of one cell whose times double from round to round, with the bytes that the strategies should keep."""
    known = {"shape": "CONV1", "layout": "contiguous", "dtype": "float32", "device": "cpu", **cell}
    input_bytes = 4 * math.prod(size)
    rows = []
    for name, ms in times_ms.items():
        buffers = 2 if name in (STANDARD, COMPILED) else 1
        row = {**known, "group": group, "size": size, "strategy": name, "input_bytes": input_bytes, "median_ms": 2 * ms}
        row |= {"saved_bytes": buffers * input_bytes + 8 * size[1], "saved_vector_bytes": 8 * size[1]}
        rows.append(row | {"times_ms": [ms, 2 * ms, 4 * ms]})
    return rows


def verdict_of(rows: list[dict], *words: str) -> tuple[str, str]:
    """Find the only target whose text contains all `words`; return its verdict and what was measured."""
    (found,) = [t for t in targets(rows, []) if all(word in f"{t.about} | {t.to_reach}" for word in words)]
    return found.verdict, found.measured


BIG, SMALL = [4, 64, 112, 112], [4, 8, 4, 4]


def test_time_targets_on_the_cpu():
    assert {target.verdict for target in targets([], [])} == {NOT_MEASURED}
    rows = synthetic("bn_act", BIG, {STANDARD: 1.0, INPLACE_2: 0.79, EAGER: 1.31})
    assert verdict_of(rows, "`backend=auto`, NCHW") == (PASS, "0.79 (CONV1 contiguous float32)")
    assert verdict_of(rows, "eager backend, NCHW")[0] == MISS
    rows += synthetic("bn_act", BIG, {STANDARD: 1.0, INPLACE_2: 0.81}, shape="CONV2")
    assert verdict_of(rows, "`backend=auto`, NCHW")[1] == "0.79 – 0.81, 1 of 2; worst CONV2 contiguous float32"
    for size, reached, other in (
        (BIG, ("above 4 MiB", MISS), "up to"),
        ([4, 64, 28, 28], ("up to 4 MiB", PASS), "above"),
    ):
        rows = synthetic("bn_act", size, {STANDARD: 1.0, INPLACE_2: 1.0}, layout="channels_last")
        assert verdict_of(rows, "`backend=auto`, channels_last", reached[0])[0] == reached[1]
        assert verdict_of(rows, "`backend=auto`, channels_last", other)[0] == NOT_MEASURED


def test_a_cell_without_a_measurement_limits_what_is_reached():
    rows = synthetic("bn_act", BIG, {STANDARD: 1.0, INPLACE_2: 0.7})
    left_out = [{"cell": "bn_act CONV2", "strategy": INPLACE_2, "reason": "failed: OutOfMemoryError"}]
    rows += synthetic("bn_act", BIG, {STANDARD: 1.0, PACKAGE: 0.7}, shape="CONV2", device="cuda")
    assert [t.verdict for t in targets(rows, left_out) if t.verdict != NOT_MEASURED] == [PASS_IN_PART]


def test_targets_of_the_package_of_saved_bytes_and_of_networks():
    """The package is not charged for its copy; half means exactly half; networks must be faster and smaller."""
    for copy_ms, verdict in ((0.5, PASS), (0.6, MISS)):
        rows = synthetic("bn_act", SMALL, {STANDARD: 1.0, INPLACE_2: 1.0, PACKAGE: 4.5, COPY: copy_ms})
        assert verdict_of(rows, "CPU", "released package | 0.25")[0] == verdict

    rows = synthetic("bn_act_conv", SMALL, dict.fromkeys((STANDARD, *OURS), 1.0))
    assert verdict_of(rows, "saved bytes, BN+ACT+CONV") == (PASS, "0.5 plus 2 C floats, 1 of 1")
    assert verdict_of(rows, "overhead")[0] == SHOWN
    rows[-1]["saved_bytes"] += 1
    assert verdict_of(rows, "saved bytes, BN+ACT+CONV")[0] == MISS

    rows = synthetic("network", [8, 3, 128, 128], {STANDARD: 2.0, COMPILED: 1.0, strategies.INPLACE_COMPILED: 0.85})
    assert verdict_of(rows, "small whole network")[0] == PASS
    rows[-1]["saved_bytes"] *= 1.1
    assert verdict_of(rows, "small whole network")[0] == MISS


def test_cuda_targets():
    large, cuda = [64, 256, 112, 112], {"device": "cuda"}
    alone = synthetic("bn_act", large, {STANDARD: 4.0, INPLACE_2: 2.6, COPY: 0.5}, **cuda)
    assert verdict_of(alone, "CUDA", "at most 0.70")[0] == PASS
    assert verdict_of(alone, "copy bandwidth") == (PASS, "0.77 (CONV1 contiguous float32)")  # 8 / 2.6 of 2 / 0.5
    for inplace_ms, verdict in ((7.9, MISS), (7.7, PASS)):  # 1.1 and 1.3 of 4
        block = synthetic("bn_act_conv", large, {STANDARD: 9.0, INPLACE_2: inplace_ms}, **cuda)
        assert verdict_of([*alone, *block], "below 1.00")[0] == PASS
        assert verdict_of([*alone, *block], "time saved")[0] == verdict
    fast = synthetic("bn_act", SMALL, {STANDARD: 0.04, INPLACE_2: 0.08, COPY: 0.01}, **cuda)
    assert verdict_of(fast, "CUDA", "at most 0.70")[0] == verdict_of(fast, "copy bandwidth")[0] == NOT_MEASURED
