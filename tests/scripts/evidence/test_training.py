"""The benchmark of training steps: what it runs and counts. No test asserts a time."""

import pytest
import torch

from engine.training import loop
from scripts.evidence import training
from scripts.evidence.steps import DEFAULT, GROUPS, PLAIN, Overhead, Switch, Training, composed
from scripts.evidence.training import TrainingArguments
from scripts.reports.measuring import Elsewhere
from tests.runs import same
from tests.scripts.evidence.records import measured

SWITCHES = list(dict.fromkeys(switch for group in GROUPS.values() for switch in group))
TINY = TrainingArguments(recipe=None, crop_size=48).suited()


def tiny(*overrides: str) -> tuple[str, ...]:
    return (*TINY.words(4), "norm.backend=eager", *overrides)


def test_a_record_has_times_and_bytes_of_what_ran_and_reasons_for_the_rest(in_process, monkeypatch, tmp_path):
    """A whole run on tiny crops: three switches that run here, one that needs CUDA, one that cannot work."""
    options = [
        "recipe=null",
        "threads=1",
        "crop_size=48",
        "crops=4",
        "starts=1",
        "rounds=2",
        'overrides=["norm.backend=eager"]',
    ]
    options += ["parts=[overhead,switches]", "overhead_crops=2", "overhead_steps=2", "overhead_rounds=2"]
    names = ("trainer.accumulation_steps=2", "trainer.tf32=true", "norm=std, budget 0.5")
    some = [switch for switch in SWITCHES if switch.name in names]
    monkeypatch.setitem(training.GROUPS, "switches", (PLAIN, *some, Switch(("optim.lr=1e30",))))
    call, text = measured("training", tmp_path, *options)
    loops = {row["loop"]: row["times_ms"] for row in call["items"]["overhead"]}
    assert {name: len(times) for name, times in loops.items()} == {"bare": 2, "real": 2}
    rows = {row["switch"]: row for row in call["items"]["start1"]}
    for name in (DEFAULT, names[0], names[2]):
        row = rows[name]
        assert len(row["times_ms"]) == 2 and row["loss"] > 0
        assert row["peak_bytes"] > row["saved_bytes"] > 0 and row["process_mib"] > 100
    # Half of the crops at a time, beside what does not depend on them.
    assert 0.5 <= rows[names[0]]["saved_bytes"] / rows[DEFAULT]["saved_bytes"] < 0.6
    assert rows[names[2]]["peak_bytes"] < rows[DEFAULT]["peak_bytes"] * 1.2
    assert rows["trainer.tf32=true"]["reason"] == "needs a CUDA device"
    assert rows["optim.lr=1e30"]["reason"].startswith("failed: FloatingPointError: the loss is nan")
    assert "- trainer.tf32=true, 1: needs a CUDA device" in text and " ms, 2 rounds." in text


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


def test_every_switch_changes_the_training_that_it_is_compared_with():
    shared = TrainingArguments().suited().words(8)
    default = composed(*shared)
    for override in {override for switch in SWITCHES for override in switch.overrides}:
        assert composed(*shared, override) != default, override
    for switch in SWITCHES:
        assert (
            switch.overrides or switch.name == DEFAULT or not (switch.freed_memory_kept and switch.data == "in memory")
        )


def test_a_gpu_is_measured_by_one_process_at_a_time_on_a_network_of_table_3():
    """Its memory would not hold them all, and two would share its time."""
    own = TrainingArguments(device="cuda").suited()
    assert (own.recipe or "").startswith("table3/") and own.crop_size == 512
    assert all(len(switches) == 1 for _, switches in training.items(own).values())
    (_, (_, switches), *_) = training.items(TrainingArguments(parts=["overhead", "norms"]).suited()).values()
    assert len(switches) == 4


@pytest.mark.slow
def test_a_compiled_training_counts_its_own_graphs():
    """In a fresh process, which also looks whether there is a compiler."""
    with Elsewhere(Training, tiny(), Switch(("trainer.compile=true",)), 1) as there:
        there.call("warm_up", 2)
        facts = there.call("facts")
    assert (facts["graphs"], facts["graph_breaks"]) == (1, 0)
