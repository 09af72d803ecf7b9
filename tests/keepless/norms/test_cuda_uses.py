"""Layers in trainings on CUDA devices. `-m gpu` runs them there; where a CPU can rehearse a test, it does."""

import copy
import multiprocessing

import pytest
import torch
import torch.distributed as dist

from keepless import InPlaceABN, InPlaceABNSync
from tests.cuda import NEEDS_CUDA

ON_CUDA = pytest.param("cuda", marks=NEEDS_CUDA)
each_device = pytest.mark.parametrize("device", ["cpu", ON_CUDA])


@each_device
@pytest.mark.parametrize("offset", [1, 2])
def test_unaligned_views_have_the_gradients_of_aligned_copies(device, offset):
    """Inputs, gradients and vectors that begin 4 or 8 bytes into their memory: no 128-bit accesses."""

    def shifted(tensor: torch.Tensor) -> torch.Tensor:
        memory = torch.empty(tensor.numel() + offset, device=device)[offset:]
        return memory.copy_(tensor.flatten()).view(tensor.shape)

    x, dz = torch.randn(2, 3, 8, 6, 6, device=device).unbind()
    layer, results = InPlaceABN(8).to(device), []
    for place in (torch.clone, shifted, torch.clone):
        own = copy.deepcopy(layer)
        vectors = {name: place(vector).requires_grad_() for name, vector in own.named_parameters()}
        leaf = place(x).requires_grad_()
        z = torch.func.functional_call(own, vectors, leaf)
        results.append([z, *torch.autograd.grad(z, [leaf, *vectors.values()], place(dz))])
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=1e-5, atol=1e-5)


def _rank(rank: int, store: str, results) -> None:
    """A rank's half of a batch: z and the gradients of x; the parameters' gradients are its share."""
    torch.cuda.set_device(device := torch.device("cuda", rank))
    dist.init_process_group("nccl", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    x, dz = batch()
    layer = InPlaceABNSync(8).to(device)
    half = x[2 * rank : 2 * rank + 2].to(device).requires_grad_()
    z = layer(half)
    found = torch.autograd.grad(z, [half, *layer.parameters()], dz[2 * rank : 2 * rank + 2].to(device))
    results.put((rank, [value.detach().tolist() for value in (z, *found, layer.running_var)]))
    dist.destroy_process_group()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(2, 4, 8, 5, 5, generator=torch.Generator().manual_seed(0)).unbind()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_ranks_equal_one_with_the_whole_batch(tmp_path):
    """They use nccl. tests/keepless/norms/test_synchronisation.py has ranks on a CPU."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    arguments = (str(tmp_path / "store"), results)
    processes = [context.Process(target=_rank, args=(rank, *arguments)) for rank in range(2)]
    for process in processes:
        process.start()
    found = dict(results.get(timeout=180) for _ in processes)
    for process in processes:
        process.join(60)
    x, dz = batch()
    layer = InPlaceABN(8)
    z = layer(x.requires_grad_())
    wanted = [z, *torch.autograd.grad(z, [x, *layer.parameters()], dz), layer.running_var]
    z, dx, dweight, dbias, running_var = ([torch.tensor(found[rank][i]) for rank in range(2)] for i in range(5))
    ours = [torch.cat(z), torch.cat(dx), sum(dweight), sum(dbias), running_var[0]]
    for result, expected in zip(ours, wanted, strict=True):
        torch.testing.assert_close(result, expected.detach(), rtol=1e-4, atol=1e-4)
