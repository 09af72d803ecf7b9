"""The benchmark of byte budgets: what it measures, and how it resumes. No test asserts a time."""

import json
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from engine.configuration.command_line import composed
from keepless.budget import search
from keepless.budget.costs import peak_bytes
from keepless.budget.simulation import simulate
from keepless.budget.traced_step import traced_step
from scripts.evidence import methods, networks_budget
from scripts.evidence.methods import BLOCKS, PLAIN, RECOMPUTED
from scripts.evidence.networks_budget import AS_BLOCKS, IN_TIME_OF_BLOCKS, pictures
from tests.scripts.evidence import records
from tests.scripts.evidence.records import measured

SMALL, FAILS = "squeezenet1_1", "resnet18"


@pytest.fixture
def here(monkeypatch):
    """Measure without processes, on quick plans."""
    build = methods.build
    monkeypatch.setattr(methods, "build", lambda name, size: nn.Identity() if name == FAILS else build(name, size))
    monkeypatch.setattr(methods, "alone", records.alone)
    monkeypatch.setattr(search, "_SECONDS", 1.0)


def test_plans_are_measured_beside_the_rivals(here, tmp_path):
    """Bytes as planned and gradients to the bit, in a whole run; the same command then measures nothing again."""
    options = ["rounds=1", "images=2", "image_size=64", "compiler=null", f"only=[{SMALL},{FAILS}]"]
    result, text = measured("networks_budget", networks_budget.run, tmp_path, *options)
    rows = {row["method"]: row for row in result["rows"]}
    assert [*rows][:3] == [PLAIN, RECOMPUTED, BLOCKS] and {AS_BLOCKS, IN_TIME_OF_BLOCKS} <= rows.keys()
    plans = [row for row in rows.values() if "planned_bytes" in row]
    assert len(plans) >= 4 and all(row["deviation"] == 0 for row in plans)
    for row in plans:
        assert row["peak_bytes"] == pytest.approx(row["planned_bytes"], rel=0.03)
        assert row["budget"] is None or row["peak_bytes"] <= 1.03 * row["budget"]
    (entry,) = result["left_out"]
    assert entry["network"] == FAILS and f"- {FAILS}, {methods.ALL}: failed: " in text
    assert (
        f"- {len(plans)} plans: measured peaks are within " in text and "- With the peak of the checkpoints, a" in text
    )
    assert "| squeezenet1_1 | plain |" in text and list(pictures(result)) == [""]
    before = (tmp_path / "record.json").read_bytes()
    networks_budget.run(composed("networks_budget", f"out={tmp_path / 'record.json'}", *options))
    assert json.loads(before)["rows"] == json.loads((tmp_path / "record.json").read_bytes())["rows"]


def test_networks_without_plans_are_refused_and_no_picture_is_drawn_of_nothing(tmp_path):
    with pytest.raises(ValueError, match=r"only=\['frozen/resnet50'\]: frozen networks are not measured"):
        networks_budget.run(composed("networks_budget", f"out={tmp_path / 'a.json'}", "only=[frozen/resnet50]"))
    assert pictures({"rows": []}) == {}


@pytest.mark.slow
def test_a_rival_that_fails_leaves_the_others(here, monkeypatch, tmp_path):
    forward_of = methods.forward_of

    def failing(network, method, compiler=None):
        if method == BLOCKS:
            raise RuntimeError("out of memory")
        return forward_of(network, method, compiler)

    monkeypatch.setattr(methods, "forward_of", failing)
    options = ["rounds=1", "images=2", "image_size=64", "compiler=null", f"only=[{SMALL}]"]
    result, _ = measured("networks_budget", networks_budget.run, tmp_path, *options)
    assert [entry["method"] for entry in result["left_out"]] == [BLOCKS]
    assert {PLAIN, RECOMPUTED, "the least"} <= {row["method"] for row in result["rows"]}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name in methods.NETWORKS if name.startswith(("transformers/", "diffusers/", "nnunet/"))]
)
def test_networks_of_texts_and_noise_repeat_no_more_than_their_checkpoints(name):
    """A plan at the checkpoints' peak, counted in operations."""
    if not methods.installed(name):
        pytest.skip(f"{methods.package_of(name)} is not installed")
    pixels = torch.randn(2, 3, 64, 64)
    plain, checkpointed = (networks_budget.Trained(methods.random_network(name, 64)) for _ in range(2))
    for block in methods.blocks_of(checkpointed):
        block.forward = partial(methods._checkpointed, block.forward)

    def step(network: nn.Module) -> None:
        networks_budget.training_step(network, network, pixels)

    step(plain), step(checkpointed)
    theirs = peak_bytes(lambda: step(checkpointed), "cpu")
    operations = []
    for network in (plain, checkpointed):
        with FlopCounterMode(display=False) as counter:
            step(network)
        operations.append(counter.get_total_flops())
    traced, _ = traced_step(plain, (pixels,), {})
    costs = [value._replace(seconds=value.operations + value.bytes) for value in traced.values]  # they do not vary
    traced = traced._replace(values=costs)
    choices = search.frontier(traced, theirs)
    ours = next(choice for choice in choices if choice.peak <= theirs)
    readers = simulate(traced, ours.kept).readers
    again = [value for value, kept, count in zip(traced.values, ours.kept, readers, strict=True) if not kept and count]
    assert sum(value.operations for value in again) <= operations[1] - operations[0]
