"""The benchmark of known networks: what it counts. No test asserts a time."""

import pytest
import torch
from torch import nn
from torchvision.models import resnet

from keepless.saved import kept_bytes
from scripts.evidence import methods, zoo
from scripts.evidence.methods import BLOCKS, BUDGET, COMPILED, PLAIN, RECOMPUTED
from scripts.evidence.networks import AS_BLOCKS, IN_TIME_OF_BLOCKS, LEAST
from scripts.evidence.zoo import blocks_of, build
from scripts.reports.frame import rows_of
from tests.scripts.evidence.records import measured

SMALL, FAILS = "squeezenet1_1", "maxvit_t"  # whose windows do not fit into small images


class Segments(nn.Sequential):
    """Returns logits in a dictionary, as torchvision's segmentation networks do, from a hundredth of their weights."""

    def __init__(self):
        super().__init__(nn.Conv2d(3, 16, 3), *(resnet.BasicBlock(16, 16) for _ in range(2)), nn.Conv2d(16, 5, 1))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"out": super().forward(x)}


@pytest.mark.slow
def test_every_method_is_measured_beside_the_plain_network_and_plans_beside_their_rivals(
    in_process, monkeypatch, tmp_path
):
    """A whole run on two networks and one that does not work, with a compiler that takes no time."""
    monkeypatch.setattr(methods, "WITH_COMPILER", (SMALL,))

    def without_dropout(name: str, size: int) -> nn.Module:  # or the compiler gets no budget
        network = Segments() if name == "fcn_resnet50" else build(name, size)
        for dropout in (module for module in network.modules() if isinstance(module, nn.Dropout)):
            dropout.p = 0.0
        return network

    monkeypatch.setattr(zoo, "build", without_dropout)
    own = [f"only=[{SMALL},fcn_resnet50,{FAILS}]", "rounds=2", "images=2", "image_size=64", "shares=[0.6]"]
    call, text = measured("networks", tmp_path, *own, "compiler=aot_eager")
    rows = {(row["network"], row["method"]): row for row in rows_of(call)}
    assert {(SMALL, method) for method in (PLAIN, RECOMPUTED, BLOCKS, COMPILED, BUDGET)} < rows.keys()
    assert {("fcn_resnet50", method) for method in (PLAIN, RECOMPUTED, BLOCKS, AS_BLOCKS, LEAST)} < rows.keys()
    assert {*call["left"]} == {FAILS} and f"- {FAILS}: failed: " in text
    for (name, method), row in rows.items():
        assert len(row["times_ms"]) == 2 and row.get("deviation", 0) == 0
        if "planned_bytes" in row:
            # Plans depend on measured times: a step may choose another one within the same budget.
            assert row["peak_bytes"] <= 1.03 * max(row["budget"] or 0, row["planned_bytes"])
            if method == LEAST:
                assert row["peak_bytes"] == pytest.approx(row["planned_bytes"], rel=0.03)
        else:
            assert row["peak_bytes"] > 0.9 * row["kept_bytes"] > 0
        if method in (RECOMPUTED, BLOCKS):
            assert row["kept_bytes"] < 0.9 * rows[name, PLAIN]["kept_bytes"] and "deviation" in row
    plans = sum("planned_bytes" in row for row in rows.values())
    assert plans >= 4 and (SMALL, IN_TIME_OF_BLOCKS) in rows
    assert f"- {plans} plans: measured peaks are at most " in text and "- With the peak of the checkpoints, a" in text
    assert "| recompute_activations | 2 |" in text and "| compiled | 1 |" in text


class BasicBlock(nn.Module):
    """A block by its name. It takes a list, as DenseNet's layers do."""

    def forward(self, inputs: list[torch.Tensor]) -> torch.Tensor:
        return sum(inputs).sigmoid().sigmoid()


def test_checkpointed_blocks_keep_their_inputs_once():
    class Dense(nn.ModuleList):
        def forward(self, x):
            features = [x * 1]
            for block in self:
                features.append(block(list(features)))
            return features[-1]

    x = torch.randn(1000, requires_grad=True)
    plain, network = (Dense(BasicBlock() for _ in range(3)) for _ in range(2))
    assert len(blocks_of(network)) == 3
    assert kept_bytes(plain, lambda: plain(x), [x]) == 3 * 2 * x.nbytes
    forward = methods.forward_of(network, BLOCKS)
    assert kept_bytes(network, lambda: forward(x), [x]) == 3 * x.nbytes
    torch.testing.assert_close(forward(x), plain(x), rtol=0, atol=0)


@pytest.mark.slow
def test_there_are_enough_networks_and_their_blocks_are_known():
    assert len([name for name in zoo.NETWORKS if "/" not in name]) >= 25
    for name in zoo.NETWORKS:
        if name.startswith("regnet_x") or name == zoo.DECODER:  # like regnet_y
            continue
        try:
            with torch.device("cpu" if name.startswith("regnet") else "meta"):
                network = build(name, 224)
        except ModuleNotFoundError:  # an optional package
            assert "/" in name
            continue
        assert (len(blocks_of(network)) >= 8) == (name not in ("alexnet", "vgg16_bn")), name


def test_the_compiler_gets_no_budget_where_its_gradients_would_be_wrong():
    """https://github.com/pytorch/pytorch/issues/190758: with dropout, on CPUs."""
    network = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    assert BUDGET not in methods.methods_of("resnet50", network, "cpu", "eager")
    with pytest.raises(ValueError, match="Sequential has dropout or stochastic depth: give budget=1"):
        methods.forward_of(network, BUDGET, "eager")
    network[1].p = 0.0
    assert BUDGET in methods.methods_of("resnet50", network, "cpu", "eager")
    assert methods.forward_of(network, BUDGET, "eager")(torch.ones(2, 4)).shape == (2, 4)
