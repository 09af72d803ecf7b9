"""Recomputation and reversible modules in two processes: the gradients are those of one, or of plain networks."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.modules._functions import SyncBatchNorm
from torch.nn.parallel import DistributedDataParallel

from models.layers import InPlaceABN, recompute_activations
from scripts.bench.measuring import kept_bytes
from tests.models.layers import test_recompute_activations_uses as recomputation
from tests.models.layers import test_reversible as reversible
from tests.models.layers.test_recompute_activations_uses import assert_same, gradients, loss_of, small
from tests.ranks import Ranks


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    ranks = Ranks(2, tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.stop()


def _data_parallel(rank: int, wrapper: str) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients of a prepared and of a plain network, each wrapped, of a rank's own images."""
    results = []
    for prepare in (recompute_activations, lambda network: network):
        network = prepare(small())
        images = recomputation.IMAGES * (rank + 1)
        if wrapper == "ddp":
            wrapped: nn.Module = DistributedDataParallel(network)
            loss_of(wrapped, images).backward()
            results.append([parameter.grad for parameter in network.parameters()])
        else:
            for block in network:
                fully_shard(block, reshard_after_forward=True)
            fully_shard(network)
            loss_of(network, images).backward()
            results.append([parameter.grad.full_tensor() for parameter in network.parameters()])
    return results[0], results[1]


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_data_parallel(two_ranks, wrapper):
    """FSDP has freed a norm's parameters when the layer after it asks for the norm's output."""
    for found, expected in two_ranks.run(_data_parallel, wrapper):
        assert_same(found, expected)


class Synchronised(nn.BatchNorm2d):
    """What `nn.SyncBatchNorm` calls, which itself refuses CPUs."""

    def forward(self, x: Tensor) -> Tensor:
        group = dist.group.WORLD
        return SyncBatchNorm.apply(
            x, self.weight, self.bias, self.running_mean, self.running_var, self.eps, 0.1, group, dist.get_world_size()
        )


def _synchronised(rank: int) -> list[tuple[list[Tensor], list[Tensor], list[int]]]:
    """Gradients and kept bytes of prepared and plain networks with synchronised norms, then with frozen biases."""
    library = torch.library.Library("aten", "IMPL")  # CPUs lack these kernels
    dims = [0, 2, 3]

    def elemt(x, weight, bias, mean, invstd, eps):
        shape = (1, -1, 1, 1)
        return (x - mean.view(shape)) * (invstd * weight).view(shape) + bias.view(shape)

    def reduce(dy, x, mean, invstd, weight, *wanted):
        x_mu = x - mean.view(1, -1, 1, 1)
        sums = dy.sum(dims), (dy * x_mu).sum(dims)
        return *sums, sums[1] * invstd, sums[0]

    def backward_elemt(dy, x, mean, invstd, weight, sum_dy, sum_dy_xmu, count):
        total, shape = count.sum(), (1, -1, 1, 1)
        slope = (sum_dy_xmu / total * invstd**2).view(shape)
        return (dy - (sum_dy / total).view(shape) - (x - mean.view(shape)) * slope) * (invstd * weight).view(shape)

    def gather(x, means, invstds, running_mean, running_var, momentum, eps, counts):
        weights = (counts / counts.sum()).view(-1, 1)
        mean = (means * weights).sum(0)
        var = ((invstds**-2 - eps + means**2) * weights).sum(0) - mean**2
        return mean, torch.rsqrt(var + eps)

    kernels = {
        "batch_norm_stats": lambda x, eps: (x.mean(dims), torch.rsqrt(x.var(dims, unbiased=False) + eps)),
        "batch_norm_gather_stats_with_counts": gather,
        "batch_norm_elemt": elemt,
        "batch_norm_backward_reduce": reduce,
        "batch_norm_backward_elemt": backward_elemt,
    }
    for name, kernel in kernels.items():
        library.impl(name, kernel, "CPU")
    answers = []
    for frozen in (False, True):
        results, kept = [], []
        for prepare in (recompute_activations, lambda network: network):
            torch.manual_seed(0)
            network = nn.Sequential(nn.Conv2d(3, 4, 3), Synchronised(4), nn.ReLU(), nn.Conv2d(4, 2, 1)).double()
            network[1].bias.requires_grad_(not frozen)
            network = prepare(network)
            results.append(gradients(network, recomputation.IMAGES * (rank + 1)))
            kept.append(kept_bytes(network, lambda n=network: loss_of(n, recomputation.IMAGES), [recomputation.IMAGES]))
        answers.append((results[0], results[1], kept))
    return answers


def test_synchronised_norms(two_ranks):
    """A frozen bias is not in the node, so what follows from it is kept."""
    for answers in two_ranks.run(_synchronised):
        assert isinstance(answers, list), answers
        for found, expected, _ in answers:
            assert_same(found, expected, 1e-10)
        (_, _, trained), (_, _, frozen) = answers
        assert trained[0] < 0.7 * trained[1] and frozen[0] == frozen[1]


def _whole_and_share(rank: int) -> list:
    """Gradients and statistics of a rank with synchronised norms, and its share of the minibatch."""
    network, _ = reversible.twins("sequence", partial(reversible.additive, norm=partial(InPlaceABN, sync=True)))
    parallel = DistributedDataParallel(network)
    images = reversible.IMAGES.repeat(2, 1, 1, 1)[2 * rank : 2 * rank + 2 + 2 * rank]
    parallel(images).square().sum().backward()
    return [t.detach().numpy() for t in (*(p.grad for p in network.parameters()), *network.buffers())]


def test_reversible_modules_with_synchronised_norms_are_one_network(two_ranks):
    network, _ = reversible.twins("sequence", reversible.additive)
    (network(reversible.IMAGES.repeat(2, 1, 1, 1)).square().sum() / 2).backward()
    expected = dict(enumerate([*(p.grad for p in network.parameters()), *network.buffers()]))
    for result in two_ranks.run(_whole_and_share):
        reversible.assert_same(dict(enumerate(map(torch.from_numpy, result))), expected, 1e-10)
