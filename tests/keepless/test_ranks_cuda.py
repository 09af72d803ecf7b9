"""Two processes on CUDA, connected by gloo on one device: gradients equal one process's, or the plain network's."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from keepless import InPlaceABN, recompute_activations
from tests.cuda import NEEDS_CUDA

WORLD_SIZE = 2


def of_half_a_batch(rank: int) -> list[Tensor]:
    """Output and input gradient of this rank's half by a synchronised norm, then by a norm with the whole batch."""
    torch.manual_seed(0)
    x, dz = torch.randn(2, 8, 32, 16, 16, device="cuda").unbind()
    half, results = slice(4 * rank, 4 * rank + 4), []
    for sync, part in ((True, half), (False, slice(None))):
        inputs = x[part].clone().requires_grad_()
        z = InPlaceABN(32, sync=sync).cuda()(inputs)
        results += [z.detach(), torch.autograd.grad(z, inputs, dz[part])[0]]
    return [results[0].cpu(), results[1].cpu(), results[2][half].cpu(), results[3][half].cpu()]


def gradients(rank: int, wrapper: str) -> list[list[Tensor]]:
    """Gradients of the third step: of the plain network, recomputed, and within a budget."""
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(64, 4, 128, 0.0, "gelu", batch_first=True, norm_first=True)
    plain, gradients = nn.Sequential(*(copy.deepcopy(block) for _ in range(3))).cuda(), []
    x = torch.randn(4, 32, 64, device="cuda") + rank
    for options in (None, {}, {"budget": 0.5}):
        network = copy.deepcopy(plain)
        if wrapper == "fsdp2":
            mesh = init_device_mesh("cuda", (WORLD_SIZE,))
            trained = fully_shard(nn.Sequential(*(fully_shard(layer, mesh=mesh) for layer in network)), mesh=mesh)
        if options is not None:
            recompute_activations(network if wrapper == "ddp" else trained, **options)
        if wrapper == "ddp":
            trained = DistributedDataParallel(network)
        for _ in range(3):
            trained.zero_grad()
            trained(x).square().mean().backward()
        step_gradients = [parameter.grad for parameter in trained.parameters()]
        gradients.append(
            [(gradient.full_tensor() if wrapper == "fsdp2" else gradient).cpu() for gradient in step_gradients]
        )
    return gradients


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=NEEDS_CUDA)])
def test_a_synchronised_norm_on_half_of_a_batch_equals_one_with_the_whole_batch(device, ranks):
    for z, dx, whole_z, whole_dx in ranks.run(of_half_a_batch):
        torch.testing.assert_close(z, whole_z, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(dx, whole_dx, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=NEEDS_CUDA)])
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_recomputed_gradients_in_a_group_are_the_plain_networks(wrapper, device, ranks):
    for plain, *prepared in ranks.run(gradients, wrapper):
        for prepared_gradients in prepared:
            for gradient, expected in zip(prepared_gradients, plain, strict=True):
                torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)
