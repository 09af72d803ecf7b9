"""The benchmark of training steps: what it runs and counts. No test asserts a time."""

import pytest
import torch

from engine import loop
from scripts.evidence import training
from scripts.evidence.measuring import Elsewhere
from scripts.evidence.training import TrainingArguments
from scripts.evidence.training_steps import DEFAULT, GROUPS, PLAIN, Overhead, Switch, Training, composed
from tests.runs import same
from tests.scripts.evidence.records import here, measured

SWITCHES = list(dict.fromkeys(switch for group in GROUPS.values() for switch in group))
TINY = TrainingArguments(recipe=None, crop_size=48)


def tiny(*overrides: str) -> tuple[str, ...]:
    return (*TINY.overrides(crops=4), "norm.backend=eager", *overrides)


def test_a_record_has_times_and_bytes_of_what_ran_and_reasons_for_the_rest(monkeypatch, tmp_path):
    """A whole run on tiny crops: two switches that run here, one that needs CUDA, one that cannot work."""
    options = ["recipe=null", "threads=1", "crop_size=48", "crops=4", "starts=1", "rounds=2"]
    options += ["parts=[overhead,switches]", "overhead_crops=2", "overhead_steps=2", "overhead_rounds=2"]
    some = [s for s in SWITCHES if s.name in ("trainer.accumulation_steps=2", "trainer.tf32=true")]
    monkeypatch.setattr(training, "Elsewhere", here)
    monkeypatch.setitem(training.GROUPS, "switches", (PLAIN, *some, Switch(("optim.lr=1e30",))))
    result, text = measured("training", training.run, tmp_path, *options)
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
    assert "| `trainer.tf32=true` | not measured: needs a CUDA device |" in text and " ms, 2 rounds." in text


def test_both_loops_train_the_same():
    """One turn of each from the same weights: what the loop adds is no arithmetic."""
    real, bare = (Overhead(tiny(), threads=1, steps=3) for _ in range(2))
    before = {name: tensor.clone() for name, tensor in bare.learner.network.state_dict().items()}
    real.learner.scheduler.step = lambda: None  # the bare loop has no schedule
    real.bare = lambda: 0.0
    real.rounds(0)  # the one that warms up
    bare.bare()
    after = real.learner.network.state_dict()
    assert same(after, bare.learner.network.state_dict())
    assert not any(torch.equal(before[name], after[name]) for name in before if name.endswith("weight"))


def test_rounds_alternate_which_loop_comes_first_and_leave_the_first_round_out(monkeypatch):
    """Three rounds of two steps, of which the first warms up."""
    calls = []
    monkeypatch.setattr(loop, "train_step", lambda *_: calls.append("real") or (0.0, 0.0))
    loops = Overhead(tiny(), threads=1, steps=2)
    loops.bare = lambda: calls.append("bare") or 7.0
    times = loops.rounds(2)
    assert " ".join(calls) == "real real bare bare real real real real bare"
    assert times["bare"] == [7.0, 7.0] and len(times["real"]) == 2


def test_saved_bytes_are_counted_once_and_without_parameters():
    inplace, standard = (Training(tiny(f"norm={norm}"), PLAIN, threads=1) for norm in ("inplace", "std"))
    assert 0.4 < inplace.saved_bytes() / standard.saved_bytes() < 0.75


def test_every_switch_changes_the_training_that_it_is_compared_with():
    shared = TrainingArguments().overrides(crops=8)
    default = composed(*shared)
    for override in {override for switch in SWITCHES for override in switch.overrides}:
        assert composed(*shared, override) != default, override
    for switch in SWITCHES:
        assert switch.overrides or switch == PLAIN or not (switch.freed_memory_kept and switch.data == "in memory")


def test_a_gpu_is_measured_by_one_process_at_a_time_on_a_network_of_table_3(monkeypatch):
    """Its memory would not hold them all, and two would share its time."""
    running, most = [], []

    class Counted:
        def __init__(self, make, common, switch, threads):
            self.name = switch.name

        def __enter__(self):
            running.append(self.name)
            most.append(len(running))
            return self

        def __exit__(self, *error):
            running.remove(self.name)

        def call(self, method, *given):
            return 1.0 if method == "step" else {method: self.name}

    monkeypatch.setattr(training, "Elsewhere", Counted)
    switches = {switch.name: switch for switch in SWITCHES}
    for device, count in (("cuda", 1), ("cpu", len(switches))):
        most.clear()
        arguments = TrainingArguments(device=device).suited()
        rows, failed = training.one_start(arguments, switches)
        assert list(rows) == [*switches] and not failed and max(most) == count
        assert (arguments.crop_size == 512) == (arguments.recipe or "").startswith("table3/") == (device == "cuda")


@pytest.mark.slow
def test_a_compiled_training_counts_its_own_graphs():
    """In a fresh process, which also looks whether there is a compiler."""
    with Elsewhere(Training, tiny(), Switch(("trainer.compile=true",)), 1) as there:
        there.call("warm_up", 2)
        facts = there.call("facts")
    assert (facts["graphs"], facts["graph_breaks"]) == (1, 0)
