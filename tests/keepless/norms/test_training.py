"""The layers in real training code: whole networks, recomputation, copies, compilation, shortcuts."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from keepless import InPlaceABN, recompute_activations
from keepless.saved import kept_bytes, saved_for_backward
from models.blocks import Convolutions, IdentityResidualBlock
from tests.cuda import NEEDS_CUDA
from tests.norms import CHECKPOINTED, STRATEGIES


def block(norm_act) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(IdentityResidualBlock(Convolutions(4, (4, 8)), norm_act), norm_act(8)).double()


def gradients(network: nn.Module, inputs: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(1)  # for dropout
    return torch.autograd.grad(network(inputs).square().mean(), list(network.parameters()))


assert_close = partial(torch.testing.assert_close, rtol=0, atol=1e-10)


def activation_bytes(network: nn.Module, inputs: torch.Tensor) -> int:
    return kept_bytes(network, lambda: network(inputs), ())


READERS = {
    "two readers": lambda network, z: network.conv(z) * z.sum(),
    "stacked": lambda network, z: network.conv(network.second(z)),
}


@pytest.mark.parametrize("strategy", CHECKPOINTED)
@pytest.mark.parametrize("kind", READERS)
def test_nothing_keeps_the_output_of_a_checkpointed_layer(strategy, kind):
    network, outputs = nn.ModuleDict({"first": STRATEGIES[strategy](4), "second": STRATEGIES[strategy](4)}), []
    network["conv"] = nn.Conv2d(4, 4, 3, padding=1)
    network.forward = lambda x: READERS[kind](network, network.first(x))
    for norm in (network.first, network.second):
        norm.register_forward_hook(lambda norm, args, z: outputs.append(z.untyped_storage()))
    recompute_activations(network, checkpointed_only=True)
    for _ in range(2):
        _, saved = saved_for_backward(lambda: network(torch.randn(2, 4, 8, 8) * 1))
        assert len(outputs) == (2 if kind == "stacked" else 1)
        assert not {tensor.untyped_storage()._cdata for tensor in saved} & {storage._cdata for storage in outputs}
        outputs.clear()
        network.eval()  # as in fine-tuning


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_torch_checkpoint_around_a_block(strategy, use_reentrant):
    """The recomputed forward pass has the same gradients and does not count its minibatch again."""
    network = nn.Sequential(STRATEGIES[strategy](4), nn.Conv2d(4, 4, 3), STRATEGIES[strategy](4)).double()
    plain = copy.deepcopy(network)
    x = torch.randn(3, 4, 8, 8, dtype=torch.float64, requires_grad=True)
    expected = torch.autograd.grad(plain(x).square().mean(), [x, *plain.parameters()])
    checkpoint(network, x, use_reentrant=use_reentrant).square().mean().backward()
    assert_close([x.grad, *(p.grad for p in network.parameters())], [*expected])
    assert_close([*network.buffers()], [*plain.buffers()])


@pytest.mark.parametrize(
    "strategy", ["inplace", *(pytest.param(name, marks=pytest.mark.slow) for name in ("std", *CHECKPOINTED))]
)
def test_compiles_to_one_graph_that_keeps_no_more(strategy):
    """Saved tensors cross the graph's boundary, where they are counted."""
    torch._dynamo.reset()
    network = recompute_activations(block(STRATEGIES[strategy]), checkpointed_only=True)
    compiled = torch.compile(network, fullgraph=True, backend="aot_eager_decomp_partition")
    x = torch.randn(2, 4, 16, 16, dtype=torch.float64)
    assert_close(gradients(compiled, x), gradients(network, x))
    # With torch 2.11 (on Python 3.10) the compiler keeps more of in-place norms: 104 KiB for 64 KiB.
    if strategy not in CHECKPOINTED and not (strategy == "inplace" and torch.__version__.startswith("2.11.")):
        vectors = 2 * 8 * x.itemsize  # two of 8 channels, which older compilers keep
        assert activation_bytes(compiled, x) <= activation_bytes(network, x) + vectors


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_CUDA)])
@pytest.mark.parametrize("offset", [1, 2])
def test_unaligned_views_have_the_gradients_of_aligned_copies(device, offset):
    """Inputs, gradients and vectors that begin 4 or 8 bytes into their memory: no 128-bit accesses."""

    def shifted(tensor: torch.Tensor) -> torch.Tensor:
        memory = torch.empty(tensor.numel() + offset, device=device)[offset:]
        return memory.copy_(tensor.flatten()).view(tensor.shape)

    x, dz = torch.randn(2, 3, 8, 6, 6, device=device).unbind()
    layer, results = InPlaceABN(8).to(device), []
    for place in (torch.clone, shifted, torch.clone):
        twin = copy.deepcopy(layer)
        vectors = {name: place(vector).requires_grad_() for name, vector in twin.named_parameters()}
        leaf = place(x).requires_grad_()
        z = torch.func.functional_call(twin, vectors, leaf)
        results.append([z, *torch.autograd.grad(z, [leaf, *vectors.values()], place(dz))])
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=1e-5, atol=1e-5)
