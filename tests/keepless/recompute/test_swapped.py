"""Parameters that are swapped between steps, passes that cannot be watched, and generators."""

import copy

import pytest
import torch
from torch import nn

from keepless import recompute_activations
from tests.keepless.recompute.ahead import After, plans


@pytest.mark.parametrize("budget", [None, 0.5])
@pytest.mark.filterwarnings("ignore:no plan keeps this step")
def test_no_weak_reference_to_a_tensor_of_a_network_outlives_a_pass(budget):
    network = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 4))
    recompute_activations(network, budget=budget)
    for _ in range(3):
        network(torch.randn(6, 8)).sum().backward()
        network.zero_grad()
        for tensor in [*network.parameters(), *network.buffers()]:
            torch.utils.swap_tensors(tensor, copy.deepcopy(tensor))  # an error if there is one


@pytest.mark.filterwarnings("error::UserWarning")
def test_a_jacobian_a_vmap_and_a_traced_graph_are_not_watched():
    network = recompute_activations(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), budget=0.9)
    torch.autograd.functional.jacobian(network, torch.randn(2, 8), vectorize=True, strategy="forward-mode")
    torch.vmap(network)(torch.randn(3, 2, 8)).sum().backward()
    torch.fx.symbolic_trace(After(network, lambda y: y * 2))
    for _ in range(2):
        network(torch.randn(64, 8)).sum().backward()
    assert plans(network)[-1] == 1


def test_a_forward_pass_that_is_a_generator_gets_a_word():
    network = recompute_activations(After(nn.Linear(4, 4), lambda y: (value for value in [y.sigmoid()])))
    with pytest.warns(UserWarning, match="the forward pass of After returns a generator") as caught:
        for _ in range(2):
            sum(network(torch.randn(2, 4))).sum().backward()
    assert len(caught) == 1
