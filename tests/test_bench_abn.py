"""The benchmark: what it counts, whom it compares, how it judges. No test asserts a time."""

import json
from pathlib import Path

import pytest
import torch
from omegaconf import MISSING, OmegaConf

from engine import command_line as commands
from scripts.bench_abn import benchmark, cells
from scripts.bench_abn.__main__ import run
from scripts.bench_abn.arguments import Benchmark, command_line, with_defaults
from scripts.bench_abn.cells import Cell
from scripts.bench_abn.measuring import Work, interleaved
from scripts.bench_abn.page import chart, markdown, summary
from scripts.bench_abn.strategies import (
    BUDGET,
    CHECKPOINTING_B,
    CHECKPOINTING_C,
    COMPILED,
    COPY,
    INPLACE_1,
    INPLACE_2,
    INPLACE_COMPILED,
    PACKAGE,
    STANDARD,
    SYNC,
)
from scripts.bench_abn.targets import EAGER, PASS_IN_PART, SHOWN, verdicts
from scripts.memory_measurement import peak_bytes
from scripts.records import MISS, NOT_MEASURED, PASS

REPOSITORY = Path(__file__).resolve().parent.parent
TINY = {"batch": 2, "channels": [8], "pixels": [4], "large": False, "rounds": 2, "sample_ms": 0.1}
OURS = (CHECKPOINTING_B, CHECKPOINTING_C, INPLACE_1, INPLACE_2)


@pytest.fixture(scope="module")
def record(tmp_path_factory) -> Path:
    """A whole run on tensors of 1 KiB, with a compiler that takes no time."""
    out = tmp_path_factory.mktemp("benchmark") / "tiny.json"
    config = Benchmark(out=str(out), groups=["bn_act", "bn_act_conv"], compiler="aot_eager", backend="eager", **TINY)
    assert run(OmegaConf.structured(config)) == out.with_suffix(".md")
    return out


def rows_of(record: Path, group: str, layout: str) -> dict[str, dict]:
    rows = json.loads(record.read_text())["rows"]
    return {row["strategy"]: row for row in rows if (row["group"], row["layout"]) == (group, layout)}


@pytest.mark.parametrize("layout", cells.LAYOUTS)
def test_every_strategy_has_a_row_with_its_bytes(record, layout):
    rows = rows_of(record, "bn_act_conv", layout)
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


def test_alone_the_same_strategies_and_the_backends(record):
    rows = rows_of(record, "bn_act", "contiguous")
    assert {STANDARD, *OURS, SYNC, COMPILED, EAGER, COPY} <= rows.keys()
    assert BUDGET not in rows
    assert rows[STANDARD]["ratio"] == 1
    assert rows[EAGER]["backend"] == rows[STANDARD]["backend"] == "eager" and rows[COMPILED]["backend"] == "aot_eager"


def test_the_page_is_made_from_the_record_alone(record):
    page, picture = (record.with_suffix(suffix) for suffix in (".md", ".png"))
    written = page.read_text()
    assert picture.stat().st_size > 10_000
    page.unlink()
    run(OmegaConf.structured(Benchmark(out=str(record), measure=False)))
    assert page.read_text() == written
    assert str(record.parent) not in record.read_text() + written
    assert written.count(f"| {INPLACE_2} |") == 5  # in the summary and in four tables
    assert (
        "saved bytes, BN+ACT+CONV, in-place II | 0.5 | 0.5 plus O(C), exactly | 0.5 plus 2 C floats, 2 of 2" in written
    )


def test_pages_in_the_documentation_are_those_of_their_records():
    for record in (REPOSITORY / "docs" / "results").glob("abn_*.json"):
        page, picture = record.with_suffix(".md"), record.with_suffix(".png")
        assert page.read_text() == markdown(json.loads(record.read_text()), picture.name), page.name
        assert picture.is_file()
    rows = json.loads((REPOSITORY / "docs" / "results" / "abn_cpu.json").read_text())["rows"]
    text = (REPOSITORY / "docs" / "memory.md").read_text()
    assert "\n".join(summary(rows)) in text
    eager = json.loads((REPOSITORY / "docs" / "results" / "abn_cpu_eager.json").read_text())
    (order,) = [v.measured for v in verdicts(eager["rows"], eager["left_out"]) if v.verdict == SHOWN]
    assert order in text


def test_the_network_is_measured_whole(monkeypatch):
    monkeypatch.setattr(cells, "NETWORK_IMAGES", (2, 3, 32, 32))
    config = with_defaults(Benchmark(groups=["network"], compiler=None, backend="eager", **TINY))
    result = benchmark.measure(config)
    rows = {row["strategy"]: row for row in result["rows"]}
    assert rows.keys() == {STANDARD, *OURS}
    assert rows[INPLACE_2]["saved_bytes"] < 0.65 * rows[STANDARD]["saved_bytes"]
    assert {entry["strategy"]: entry["reason"] for entry in result["left_out"]} == dict.fromkeys(
        (COMPILED, BUDGET, INPLACE_COMPILED), "compiler=null"
    )
    assert not torch.distributed.is_initialized()


def test_what_does_not_fit_the_minutes_is_named():
    config = with_defaults(Benchmark(groups=["bn_act"], layouts=["contiguous"], minutes=1e-9, **TINY))
    result = benchmark.measure(config)
    assert result["rows"] == []
    assert [entry["cell"] for entry in result["left_out"]] == ["bn_act CONV1 contiguous float32"]


def test_a_step_gives_the_gradients_of_everything_whoever_owns_the_input():
    cell = Cell("bn_act_conv", "CONV1", (2, 8, 4, 4), "channels_last", "float32", "cpu")
    block = cell.block(torch.nn.BatchNorm2d)
    work = Work(block, block, cell.tensor(cell.size).requires_grad_(), cell.tensor((2, 4, 4, 4)))
    expected = torch.autograd.grad(block(work.x), [work.x, *block.parameters()], work.dz)
    assert len(expected) == 4
    for gradients in (work.step(), work.owning_step()):
        torch.testing.assert_close(gradients, expected)
    assert work.x.is_contiguous(memory_format=torch.channels_last)


def test_peak_bytes_are_those_of_tensors_that_live_together():
    def step():
        first = torch.empty(1000)
        second = first.neg()
        del first
        return second.neg()

    assert peak_bytes(step, "cpu") == 2 * 1000 * 4


def test_the_input_of_an_owning_step_is_free_once_nothing_keeps_it():
    """A sigmoid keeps its output only: input and output live together, then output and gradient."""
    block = torch.nn.Sigmoid()
    x = torch.randn(1000, requires_grad=True)
    assert peak_bytes(Work(block, block, x, torch.ones(1000)).owning_step, "cpu") == 2 * 1000 * 4


def test_every_round_times_every_strategy_once():
    calls = []
    steps = {name: lambda name=name: calls.append(name) for name in "abcd"}
    times = interleaved(steps, rounds=5, sample_ms=1e-9, device="cpu")
    assert {name: len(values) for name, values in times.items()} == dict.fromkeys("abcd", 5)
    rounds = ["".join(calls[i : i + 4]) for i in range(len(calls) - 20, len(calls), 4)]
    assert all(sorted(order) == list("abcd") for order in rounds) and len(set(rounds)) > 1


def synthetic(group: str, size: list[int], times_ms: dict[str, float], **cell: str) -> list[dict]:
    """Rows of one cell, whose times double from round to round, with the bytes that the strategies should keep."""
    known = {"shape": "CONV1", "layout": "contiguous", "dtype": "float32", "device": "cpu", **cell}
    values = size[0] * size[1] * size[2] * size[3] * 4
    rows = []
    for name, ms in times_ms.items():
        kept = values * (2 if name in (STANDARD, COMPILED) else 1) + 8 * size[1]
        facts = {"saved_bytes": kept, "saved_vector_bytes": 8 * size[1], "median_ms": 2 * ms, "input_bytes": values}
        times = [ms, 2 * ms, 4 * ms]
        rows.append({**known, **facts, "group": group, "size": size, "strategy": name, "times_ms": times})
    return rows


def verdict_of(rows: list[dict], *words: str) -> tuple[str, str]:
    """(verdict, measured) of the one target whose words these are."""
    (found,) = [v for v in verdicts(rows, []) if all(word in f"{v.about} | {v.to_reach}" for word in words)]
    return found.verdict, found.measured


def test_a_ratio_is_judged_by_its_worst_cell():
    size = [4, 64, 112, 112]
    good = synthetic("bn_act", size, {STANDARD: 1.0, INPLACE_2: 0.79, EAGER: 1.31})
    bad = synthetic("bn_act", size, {STANDARD: 1.0, INPLACE_2: 0.81}, shape="CONV2")
    assert verdict_of(good, "`backend=auto`, NCHW") == (PASS, "0.79 (CONV1 contiguous float32)")
    assert verdict_of(good, "eager backend, NCHW")[0] == MISS
    verdict, measured = verdict_of([*good, *bad], "`backend=auto`, NCHW")
    assert verdict == MISS and measured == "0.79 – 0.81, 1 of 2; worst CONV2 contiguous float32"
    assert verdict_of(good, "`backend=auto`, channels_last above")[0] == NOT_MEASURED


def test_a_cell_without_a_measurement_limits_what_is_reached():
    rows = synthetic("bn_act", [4, 64, 112, 112], {STANDARD: 1.0, INPLACE_2: 0.7})
    left_out = [{"cell": "bn_act CONV2", "strategy": INPLACE_2, "reason": "failed: OutOfMemoryError"}]
    found = [v.verdict for v in verdicts(rows, left_out) if v.verdict != NOT_MEASURED]
    assert found == [PASS_IN_PART]
    failed = synthetic("bn_act", [4, 64, 112, 112], {STANDARD: 1.0, PACKAGE: 0.7}, shape="CONV2", device="cuda")
    assert [v.verdict for v in verdicts([*rows, *failed], left_out)].count(PASS_IN_PART) == 1


def test_a_cell_that_fails_does_not_lose_the_others(monkeypatch):
    def failing(steps, *args):
        raise MemoryError("no room")

    monkeypatch.setattr(benchmark, "interleaved", failing)
    result = benchmark.measure(with_defaults(Benchmark(groups=["bn_act"], layouts=["contiguous"], **TINY)))
    assert [(entry["strategy"], entry["reason"]) for entry in result["left_out"]] == [
        ("all", "failed: MemoryError: no room")
    ]
    assert "failed: MemoryError: no room" in markdown(result, "chart.png")
    assert not chart(result["rows"]).axes


@pytest.mark.parametrize("size, words", [([4, 64, 112, 112], "above 4 MiB"), ([4, 64, 28, 28], "up to 4 MiB")])
def test_channels_last_targets_depend_on_the_size(size, words):
    rows = synthetic("bn_act", size, {STANDARD: 1.0, INPLACE_2: 1.0}, layout="channels_last")
    assert verdict_of(rows, "`backend=auto`, channels_last", words)[0] == (MISS if "above" in words else PASS)
    other = "up to" if "above" in words else "above"
    assert verdict_of(rows, "`backend=auto`, channels_last", other)[0] == NOT_MEASURED


def test_the_package_is_not_charged_for_its_copy():
    times = {STANDARD: 1.0, INPLACE_2: 1.0, PACKAGE: 4.5, COPY: 0.5}
    assert verdict_of(synthetic("bn_act", [4, 8, 4, 4], times), "CPU", "released package | 0.25")[0] == PASS
    times[COPY] = 0.6
    assert verdict_of(synthetic("bn_act", [4, 8, 4, 4], times), "CPU", "released package | 0.25")[0] == MISS


def test_cuda_targets():
    large, cuda = [64, 256, 112, 112], {"device": "cuda"}
    alone = synthetic("bn_act", large, {STANDARD: 4.0, INPLACE_2: 2.6, COPY: 0.5}, **cuda)
    assert verdict_of(alone, "CUDA", "at most 0.70")[0] == PASS
    assert verdict_of(alone, "copy bandwidth") == (PASS, "0.77 (CONV1 contiguous float32)")  # 8 / 2.6 of 2 / 0.5
    block = synthetic("bn_act_conv", large, {STANDARD: 9.0, INPLACE_2: 7.9}, **cuda)
    assert verdict_of([*alone, *block], "below 1.00") == (PASS, "0.878 (CONV1 contiguous float32)")
    assert verdict_of([*alone, *block], "time saved")[0] == MISS  # 1.1 of 4
    block = synthetic("bn_act_conv", large, {STANDARD: 9.0, INPLACE_2: 7.7}, **cuda)
    assert verdict_of([*alone, *block], "time saved")[0] == PASS
    fast = synthetic("bn_act", [4, 8, 4, 4], {STANDARD: 0.04, INPLACE_2: 0.08, COPY: 0.01}, **cuda)
    assert verdict_of(fast, "CUDA", "at most 0.70")[0] == NOT_MEASURED
    assert verdict_of(fast, "copy bandwidth")[0] == NOT_MEASURED


def test_half_the_saved_bytes_means_exactly_half():
    times = dict.fromkeys((STANDARD, *OURS), 1.0)
    rows = synthetic("bn_act_conv", [4, 8, 4, 4], times)
    assert verdict_of(rows, "saved bytes, BN+ACT+CONV") == (PASS, "0.5 plus 2 C floats, 1 of 1")
    assert verdict_of(rows, "overhead")[0] == SHOWN
    next(row for row in rows if row["strategy"] == INPLACE_2)["saved_bytes"] += 1
    assert verdict_of(rows, "saved bytes, BN+ACT+CONV")[0] == MISS


def test_the_network_must_be_faster_and_smaller():
    rows = synthetic("network", [8, 3, 128, 128], {STANDARD: 2.0, COMPILED: 1.0, INPLACE_COMPILED: 0.85})
    assert verdict_of(rows, "small whole network")[0] == PASS
    next(row for row in rows if row["strategy"] == INPLACE_COMPILED)["saved_bytes"] *= 1.1
    assert verdict_of(rows, "small whole network")[0] == MISS


def test_nothing_measured_is_not_reached():
    assert {verdict.verdict for verdict in verdicts([], [])} == {NOT_MEASURED}


def test_hydra_composes_the_arguments():
    values = commands.composed("bench_abn", "out=FILE.json", "dtypes=[bfloat16]", "rounds=3")
    config = with_defaults(OmegaConf.to_object(values))
    assert (config.device, config.batch, config.dtypes) == ("cpu", 4, ["bfloat16"])
    expected = "python -m scripts.bench_abn device=cpu dtypes=[bfloat16] rounds=3 out=FILE.json"
    assert command_line(config) == expected


@pytest.mark.parametrize(
    "options, message",
    [
        ({"device": "tpu"}, "device=tpu: expected cpu or cuda"),
        ({"device": "cuda"}, "PyTorch sees no CUDA device"),
        ({"dtypes": ["float16"]}, "expected some of float32, bfloat16"),
        ({"groups": []}, "expected some of bn_act"),
        ({"backend": "cuda"}, "choose one of auto"),
        ({"rounds": 0}, "rounds=0: expected a number above 0"),
        ({"channels": [7], "pixels": [4]}, "expected even numbers"),
        ({"channels": [8, 8], "pixels": [4]}, "as many sides"),
        ({"graphs": True}, "needs device=cuda"),
        ({"out": "page.md"}, "ends in .json"),
        ({"out": MISSING}, "give out=FILE.json"),
        ({"measure": False, "out": "nothing.json"}, "does not exist"),
    ],
)
def test_impossible_arguments_are_refused(monkeypatch, tmp_path, options, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        run(OmegaConf.structured(Benchmark(**{"out": "file.json", **options})))
