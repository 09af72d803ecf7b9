"""The benchmark of known networks: their blocks, and the methods that it compares. No test asserts a time.

tests/benchmarks/test_gpu.py runs it, and tests/keepless/recompute has what the methods keep.
"""

import copy
import gc
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from benchmarks import measuring, networks, zoo
from benchmarks.zoo import blocks_of, build
from keepless.saved import kept_bytes
from tests.engine.training.tape import Tape

pytestmark = pytest.mark.slow("measures: minutes in all")


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
    forward = networks.by_blocks(network)
    assert kept_bytes(network, lambda: forward(x), [x]) == 3 * x.nbytes
    torch.testing.assert_close(forward(x), plain(x), rtol=0, atol=0)


def test_there_are_enough_networks_and_their_blocks_are_known():
    assert len([name for name in zoo.NETWORKS if "/" not in name]) >= 25
    for name in zoo.NETWORKS:
        if name.startswith("regnet_x"):  # like regnet_y
            continue
        try:
            with torch.device("cpu" if name.startswith("regnet") else "meta"):
                network = build(name, 224)
        except ModuleNotFoundError:  # an optional package
            assert "/" in name
            continue
        assert (len(blocks_of(network)) >= 8) == (name not in ("alexnet", "vgg16_bn")), name


@pytest.mark.filterwarnings("ignore:nothing is recomputed under Tape")
def test_captured_steps_read_no_memory_that_was_freed(monkeypatch):
    """A graph keeps no parameters: after each measurement here, only the steps do."""

    def as_graph(step: Callable[[], object]) -> Callable[[], None]:
        with Tape() as tape:
            step()
        return tape.replay

    monkeypatch.setattr(measuring, "captured", as_graph)
    plain, x = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()), torch.randn(2, 3, 8, 8)
    steps = measuring.Steps("cpu", "method")
    reference = networks.gradients_of(networks.WithLoss(plain), x, "float32")
    for method, change in networks.methods_of(plain, "cpu").items():
        network = copy.deepcopy(plain)
        trained = networks.WithLoss(network, change(network))
        steps.add(method, partial(networks.counts_of, trained, method, x, "float32", reference))
    steps.add("fails", lambda: 1 / 0)
    del network, trained
    gc.collect()
    *rows, failed = steps.timed(2, graphs=[networks.PLAIN, networks.RECOMPUTED, "fails"])
    assert [(row["method"], row["deviation"], len(row["times_ms"]), len(row["captured_ms"])) for row in rows] == [
        ("plain", 0, 2, 2),
        ("recompute_activations", 0, 2, 2),
    ]
    assert failed == {"method": "fails", "reason": "failed: ZeroDivisionError: division by zero"}
