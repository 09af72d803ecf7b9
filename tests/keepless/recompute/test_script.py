"""A script keeps, and computes again, exactly what the recorded pass does from which it was learned."""

import pytest
import torch
from torch import Tensor, nn
from torchvision.models import resnet

from keepless import recompute_activations
from keepless.recompute.costs import peak_bytes
from keepless.recompute.kinds import Kind


class Residual(nn.Sequential):
    """Blocks whose activations are read by two layers each."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 16, 3), *(resnet.BasicBlock(16, 16) for _ in range(2)), nn.Conv2d(16, 5, 1))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().mean()


@pytest.mark.parametrize("budget", [None, 4_000_000])
def test_a_step_by_a_script_has_the_peak_of_a_recorded_one(budget, monkeypatch):
    network, x = recompute_activations(Residual(), budget=budget), torch.randn(2, 3, 64, 64)

    def step() -> None:
        network.zero_grad(set_to_none=False)
        network(x).backward()

    with monkeypatch.context() as patched:
        patched.setattr(Kind, "learn", lambda kind, script: None)  # so the next pass is recorded, too
        for _ in range(3):
            step()
        recorded = peak_bytes(step, "cpu")
    step()  # learns the script
    assert peak_bytes(step, "cpu") <= recorded
