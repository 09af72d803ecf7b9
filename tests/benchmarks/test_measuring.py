"""Blocks that are compiled within a memory budget."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F

from benchmarks.measuring import compile_within


@pytest.mark.parametrize("drops", [False, True])
def test_a_graph_that_draws_is_not_compiled_within_a_memory_budget(drops):
    """Its gradients would be wrong on CPUs. Attention without dropout draws nothing, nor does dropout in eval mode."""

    def network(x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> torch.Tensor:
        y = F.batch_norm(x, mean, var, training=True)
        return F.dropout(F.scaled_dot_product_attention(y, y, y), 0.2, training=drops)

    graph = torch.fx.symbolic_trace(network)
    arguments = torch.randn(3, 2, 8), torch.zeros(2), torch.ones(2)
    assert callable(compile_within(graph, [*arguments], "eager", 1.0))
    with pytest.raises(ValueError, match="bernoulli.* draws random numbers") if drops else nullcontext():
        run = compile_within(graph, [*arguments], "eager", 0.5)
        torch.testing.assert_close(run(*map(torch.clone, arguments)), network(*map(torch.clone, arguments)))
    assert not arguments[1].any()  # the running mean
