"""Calls of which more than the result can be computed again, equal to the bit."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from keepless.budget.budget import traced_step
from keepless.budget.execution import ByPlan
from keepless.budget.step import Plan, Step
from keepless.recompute.recording import Recording


def with_nothing_kept(step: Step) -> Plan:
    return Plan(step.calls, frozenset(value.call for value in step.values if value.call >= 0))


def gradients(network: nn.Module, x: Tensor, context) -> list[Tensor]:
    torch.manual_seed(1)
    with context:
        loss = network(x).square().mean()
    return list(torch.autograd.grad(loss, network.parameters()))


class SelfAttention(nn.MultiheadAttention):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x, x, x, need_weights=self.training)[0]


@pytest.mark.parametrize(("needs_weights", "inside"), [(True, "softmax"), (False, "scaled_dot_product_attention")])
def test_the_functions_inside_multi_head_attention_are_computed_again(needs_weights, inside):
    network, x = SelfAttention(64, 2, batch_first=True).train(needs_weights), torch.randn(4, 32, 64)
    step, _ = traced_step(network, (x,), {})
    assert {"linear", inside} < {function.__name__ for function, *_ in step.calls}
    recording = Recording(ByPlan([with_nothing_kept(step)]), inputs=[x])
    assert all(map(torch.equal, gradients(network, x, recording), gradients(network, x, nullcontext())))
    assert {kept.bytes for kept in recording.kept if kept.kept_for in (inside, "bmm", "contiguous")} <= {
        1024
    }  # log-sum-exp


class Counting(Tensor):
    """Counts the functions of PyTorch that it is given to."""

    seen = ()

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        cls.seen += (function,)
        return super().__torch_function__(function, types, args, kwargs)


def test_functions_of_tensor_subclasses_are_not_opened():
    x = torch.randn(2, 3, requires_grad=True).as_subclass(Counting)
    with Recording():
        F.normalize(x)
    assert F.normalize in Counting.seen
