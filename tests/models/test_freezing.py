"""Frozen bodies and norms: what stays, what is trained, and what the backward pass needs."""

import copy

import pytest
import torch

from engine import assemble
from engine.process.distributed import World
from engine.training.loop import train_step
from keepless.saved import kept_bytes
from models.freezing import freeze, training_mode
from tests.engine.learners import learner_of
from tests.runs import run_config, same

SMALL = ("norm.backend=eager", "body.base_channels=[8,8,16]", "body.stem_channels=8", "head.hidden_channels=8")


def network_of(*overrides: str) -> torch.nn.Module:
    torch.manual_seed(0)
    network = assemble.network_of(run_config(*SMALL, *overrides), classes=3)
    with torch.no_grad():  # statistics and scales as after a training
        for module in network.modules():
            if "running_mean" in module._buffers:
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 2)
    return network


def step(network: torch.nn.Module) -> None:
    torch.manual_seed(1)
    images, labels = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8), torch.randint(0, 3, (2, 32, 32))
    learner = learner_of(network)
    loss = lambda outputs, labels: torch.nn.functional.cross_entropy(outputs.main.logits, labels[:, ::8, ::8])  # noqa: E731
    train_step(learner, loss, {"image": images, "label": labels}, minibatch_size=2, world=World())


@pytest.mark.parametrize("frozen", ["frozen=true", "frozen_norms=statistics", "frozen_norms=all"])
@pytest.mark.parametrize("norm", ["std", "inplace"])
def test_frozen_parts_stay_to_the_bit_and_the_others_are_trained(frozen, norm):
    network = network_of(f"body.{frozen}", f"norm={norm}")
    before = copy.deepcopy(network.state_dict())
    step(network)
    changed = {name for name, value in network.state_dict().items() if not torch.equal(value, before[name])}
    head = {name for name in before if not name.startswith("body.")}
    statistics = {name for name in before if name.endswith(("running_mean", "running_var", "num_batches_tracked"))}
    of_norms = {name.rpartition(".")[0] for name in statistics}
    scales = {name for name in before if name.rpartition(".")[0] in of_norms}
    kept = {"frozen=true": {*before}, "frozen_norms=statistics": statistics, "frozen_norms=all": scales}[frozen] - head
    assert changed == {*before} - kept


@pytest.mark.parametrize("recompute", ["none", "activations", "blocks"])
def test_a_frozen_body_keeps_nothing_for_the_backward_pass(recompute):
    for norm in ("std", "checkpoint", "inplace"):
        network = network_of("body.frozen=true", f"norm={norm}", f"trainer.recompute={recompute}")
        training_mode(network)
        images = torch.rand(2, 3, 32, 32)
        features = network.body(images)
        assert not features.requires_grad
        whole = kept_bytes(network, lambda network=network, x=images: network(x).main.logits.sum(), [images])
        rest = kept_bytes(network, lambda network=network, x=features: network.cls(network.head(x)).sum(), [features])
        assert whole - rest <= features.nbytes, norm  # which are the head's input


def test_norms_without_statistics_are_frozen_whole_or_refused():
    network = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), torch.nn.GroupNorm(2, 4))
    freeze(network, (), body=False, norms="all")
    assert [parameter.requires_grad for parameter in network.parameters()] == [True, True, False, False]
    with pytest.raises(ValueError, match="frozen_norms=statistics: the body has no norms with running statistics"):
        freeze(network, (), body=False, norms="statistics")


def test_a_copy_is_frozen_too_and_evaluation_is_left_alone():
    network = copy.deepcopy(network_of("body.frozen=true"))
    training_mode(network)
    assert network.head.training and not any(module.training for module in network.body.modules())
    plain = network_of()
    assert same(plain.state_dict(), network_of("body.frozen=true").state_dict())
    training_mode(plain)
    assert all(module.training for module in plain.modules())
