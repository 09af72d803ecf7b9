"""The benchmark of training steps: what it runs, what it counts, how it judges. No test asserts a time."""

import json
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from engine import command_line as commands
from engine import config as configuration
from engine import loop
from scripts.bench_training import benchmark
from scripts.bench_training.__main__ import run
from scripts.bench_training.benchmark import TrainingBenchmark, command_line, common
from scripts.bench_training.elsewhere import Elsewhere
from scripts.bench_training.overhead import Overhead
from scripts.bench_training.page import code, markdown, ratio, spread, targets
from scripts.bench_training.switches import ALLOCATION, COMPILED, DEFAULT, PLAIN, SWITCHES, Switch
from scripts.bench_training.training import Training, composed
from scripts.records import MISS, NOT_MEASURED, PASS

REPOSITORY = Path(__file__).resolve().parent.parent
DOCS = REPOSITORY / "docs"
TINY = TrainingBenchmark(
    recipe=None, threads=1, crop_size=48, crops=4, overhead_crops=2, overhead_steps=2, overhead_rounds=2, rounds=2
)


def tiny(*overrides: str) -> tuple[str, ...]:
    return (*common(TINY, TINY.crops), "norm.backend=eager", *overrides)


@pytest.fixture(scope="module")
def record(tmp_path_factory) -> Path:
    """A whole run on tiny crops: two switches that run here, one that needs CUDA, one that cannot work."""
    out = tmp_path_factory.mktemp("benchmark") / "tiny.json"
    broken = Switch(("optim.lr=1e30",))
    chosen = (PLAIN, *(s for s in SWITCHES if s.name in ("trainer.accumulation_steps=2", "trainer.tf32=true")), broken)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(benchmark.GROUPS, "switches", chosen)
        config = {**vars(TINY), "out": str(out), "parts": ["overhead", "switches"], "starts": 1}
        assert run(OmegaConf.structured(TrainingBenchmark(**config))) == out.with_suffix(".md")
    return out


def test_a_record_has_times_and_bytes_of_what_ran_and_reasons_for_the_rest(record):
    result = json.loads(record.read_text())
    assert {name: len(times) for name, times in result["overhead_ms"].items()} == {"bare": 2, "real": 2}
    rows = {row["switch"]: row for row in result["rows"]}
    assert rows.keys() == {DEFAULT, "trainer.accumulation_steps=2"}
    for row in rows.values():
        assert [len(times) for times in row["times_ms"]] == [2] and row["loss"] > 0
        assert row["peak_bytes"] > row["saved_bytes"] > 0 and row["process_mib"][0] > 100
    # Half of the crops at a time, beside what does not depend on them.
    half, whole = rows["trainer.accumulation_steps=2"]["saved_bytes"], rows[DEFAULT]["saved_bytes"]
    assert 0.5 <= half / whole < 0.6
    reasons = {entry["switch"]: entry["reason"] for entry in result["left_out"]}
    assert reasons["trainer.tf32=true"] == "needs a CUDA device"
    assert reasons["optim.lr=1e30"].startswith("failed: FloatingPointError: the loss is nan")


def test_the_page_is_made_from_the_record_alone(record):
    page = record.with_suffix(".md")
    written = page.read_text()
    page.unlink()
    run(OmegaConf.structured(TrainingBenchmark(out=str(record), measure=False)))
    assert page.read_text() == written
    assert str(record.parent) not in record.read_text() + written
    assert "| `trainer.tf32=true` | not measured: needs a CUDA device |" in written


def test_pages_in_the_documentation_are_those_of_their_records():
    for record in (DOCS / "results").glob("training_*.json"):
        assert record.with_suffix(".md").read_text() == markdown(json.loads(record.read_text())), record.name


def test_effects_in_the_documentation_are_those_of_the_records():
    """Every switch that was measured has a row in docs/training.md, with its time and what it keeps to the default."""
    cells = [[cell.strip() for cell in line.split("|")] for line in (DOCS / "training.md").read_text().splitlines()]
    written = {row[1]: row[2:4] for row in cells if len(row) > 5}
    times, kept = {}, {}
    for record in (DOCS / "results").glob("training_cpu*.json"):
        rows = {row["switch"]: row for row in json.loads(record.read_text())["rows"]}
        default = rows.pop(DEFAULT)
        for name, row in rows.items():
            times.setdefault(name, set()).add(f"{ratio(row, default):.2f}")
            kept[name] = f"{row['saved_bytes'] / default['saved_bytes']:.2f}".replace("1.00", "1")
    assert times.keys() == {s.name for s in (*SWITCHES, *ALLOCATION, *COMPILED) if not s.only_cuda} - {DEFAULT}
    words = (DOCS / "training.md").read_text()
    ((_, _, overhead, _),) = targets({**json.loads((DOCS / "results" / "training_cpu.json").read_text()), "rows": []})
    assert f"The training loop takes {overhead.split(' ms')[0].replace('(', '(quartiles ')} ms" in words
    for name in times:
        assert written[code(name)] == [" – ".join(sorted(times[name])), kept[name]], name


def test_both_loops_train_the_same():
    """One turn of each from the same weights: what the loop adds is no arithmetic."""
    real, bare = (Overhead(tiny(), threads=1, steps=3) for _ in range(2))
    before = {name: tensor.clone() for name, tensor in bare.learner.network.state_dict().items()}
    real.learner.scheduler.step = lambda: None  # the bare loop has no schedule
    real.bare = lambda: 0.0
    real.rounds(0)  # the one that warms up
    bare.bare()
    ends = [loops.learner.network.state_dict() for loops in (real, bare)]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    assert not any(torch.equal(before[name], ends[0][name]) for name in before if name.endswith("weight"))


def test_rounds_alternate_which_loop_comes_first_and_leave_the_first_round_out(monkeypatch):
    """Three rounds of two steps, of which the first warms up."""
    calls = []
    monkeypatch.setattr(loop, "train_step", lambda *_: calls.append("real") or (0.0, 0.0))
    loops = Overhead(tiny(), threads=1, steps=2)
    loops.bare = lambda: calls.append("bare") or 7.0
    times = loops.rounds(2)
    assert " ".join(calls) == "real real bare bare real real real real bare"
    assert times["bare"] == [7.0, 7.0] and len(times["real"]) == 2


def test_what_autograd_keeps_is_counted_without_parameters_and_once():
    training = Training(tiny("norm=inplace"), PLAIN, threads=1)
    standard = Training(tiny("norm=std"), PLAIN, threads=1)
    assert 0.4 < training.saved_bytes() / standard.saved_bytes() < 0.75


@pytest.mark.parametrize("switch", dict.fromkeys((*SWITCHES, *ALLOCATION, *COMPILED)), ids=lambda switch: switch.name)
def test_every_switch_changes_the_training_that_it_is_compared_with(switch):
    shared = common(TrainingBenchmark(), crops=8)
    plain, switched = composed(*shared), composed(*shared, *switch.overrides)
    assert (plain != switched) == bool(switch.overrides)
    assert switch.overrides or switch == PLAIN or not (switch.freed_memory_kept and switch.prefetched)


@pytest.mark.slow
def test_a_compiled_training_counts_its_own_graphs():
    """In a fresh process, which also looks whether there is a compiler."""
    with Elsewhere(Training, tiny(), Switch(("trainer.compile=true",)), 1) as training:
        training.call("warm_up", 2)
        facts = training.call("facts")
    assert (facts["graphs"], facts["graph_breaks"]) == (1, 0)


def test_objects_elsewhere_answer_fail_and_end():
    with Elsewhere(list, [3, 1, 2]) as there:
        there.call("sort")
        assert there.call("copy") == [1, 2, 3]
        with pytest.raises(ValueError):
            there.call("remove", 7)
        assert there.call("count", 1) == 1
    assert not there.process.is_alive()
    with pytest.raises(RuntimeError, match="the process ended with exit code"):
        there.call("copy")
    with Elsewhere(int, "seven") as there, pytest.raises(ValueError, match="seven"):
        there.call("bit_length")


def judged(bare_ms: float, ratios: list[float]) -> tuple[str, str]:
    times = {"bare": [bare_ms] * len(ratios), "real": [bare_ms * ratio for ratio in ratios]}
    ((_, _, measured, verdict),) = targets({"overhead_ms": times, "rows": []})
    return measured, verdict


def test_the_overhead_is_judged_by_the_median_of_steps_of_about_200_ms():
    assert judged(200, [1.0, 1.02, 1.5]) == ("1.020 (1.010 – 1.260) of 200 ms, 3 rounds", PASS)
    assert judged(200, [1.0, 1.04, 1.04])[1] == MISS
    assert judged(20, [1.0, 1.01, 1.01])[1] == NOT_MEASURED


@pytest.mark.parametrize(
    "facts, verdict",
    [
        ({"graphs": 1, "graphs_warm": 1, "graph_breaks": 0}, PASS),
        ({"graphs": 2, "graphs_warm": 2, "graph_breaks": 0}, MISS),
        ({"graphs": 1, "graphs_warm": 0, "graph_breaks": 0}, MISS),
        ({"graphs": 1, "graphs_warm": 1, "graph_breaks": 1}, MISS),
    ],
)
def test_a_compiled_network_is_one_graph(facts, verdict):
    row = {"switch": "trainer.compile=true", "first_step_s": [30.0, 9.0], **facts}
    ((*_, found),) = targets({"overhead_ms": {}, "rows": [row]})
    assert found == verdict
    ((*_, found),) = targets({"overhead_ms": {}, "rows": [{**row, "switch": COMPILED[2].name}]})
    assert found == (PASS if facts["graph_breaks"] == 0 and facts["graphs_warm"] == facts["graphs"] else MISS)


def test_ratios_are_those_within_a_round():
    default = {"times_ms": [[100.0, 200.0, 400.0], [100.0, 100.0, 100.0]]}
    row = {"times_ms": [[90.0, 180.0, 360.0], [110.0, 110.0, 110.0]]}
    assert spread(row, default) == "1.00 (0.90, 1.10)"
    slow = {"times_ms": [[2000.0, 4000.0]]}
    assert spread(slow, {"times_ms": default["times_ms"][:1]}) == "20.00"


def test_hydra_composes_the_arguments():
    values = commands.composed("bench_training", "out=FILE.json", "parts=[compile]", "recipe=null", "rounds=3")
    config = configuration.typed(values)
    expected = "python -m scripts.bench_training recipe=null rounds=3 parts=[compile] out=FILE.json"
    assert command_line(config) == expected


@pytest.mark.parametrize(
    "options, message",
    [
        ({"device": "tpu"}, "device=tpu: expected one of cpu, cuda"),
        ({"device": "cuda"}, "PyTorch sees no CUDA device"),
        ({"parts": ["all"]}, "parts=.*expected some of overhead, switches, allocation, compile"),
        ({"rounds": 0}, "rounds=0"),
        ({"out": "page.md"}, "ends in .json"),
    ],
)
def test_impossible_arguments_are_refused(monkeypatch, options, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=message):
        run(OmegaConf.structured(TrainingBenchmark(**{"out": "file.json", **options})))
