"""Processes that share a minibatch compute what one does with all of it, also where activations are computed again."""

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.modules._functions import SyncBatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from keepless import ABN, CheckpointedABN, InPlaceABN, InPlaceABNSync, recompute_activations, renew_statistics
from keepless.saved import kept_bytes
from tests.cuda import FSDP2_ON_CPUS
from tests.host_reads import host_reads
from tests.keepless.recompute.ahead import pair
from tests.keepless.recompute.test_uses import IMAGES, small
from tests.keepless.reversible import test_modules as reversible
from tests.norms import STRATEGIES

WORLD_SIZE = 3
CHANNELS = 5


def layer_of(strategy: str, **options) -> ABN:
    layer = STRATEGIES[strategy](CHANNELS, **options).double()
    with torch.no_grad():
        layer.weight.copy_(torch.linspace(-1.5, 1.4, CHANNELS))
        layer.bias.copy_(torch.linspace(-0.5, 0.5, CHANNELS))
    return layer


assert_close = partial(torch.testing.assert_close, rtol=0, atol=1e-10)


SHAPES = [(2, CHANNELS, 3, 3), (1, CHANNELS, 1, 1), (0, CHANNELS, 3, 3)]


def values_of(shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """An input of this shape, and the gradient of its output."""
    generator = torch.Generator().manual_seed(len(shape) + shape[0])
    x, dz = torch.randn(2, *shape, generator=generator, dtype=torch.float64).unbind()
    return 2 * x + 30, dz


def rows(t: Tensor) -> Tensor:
    """(N, C, H, W) -> (values, C)."""
    return t.movedim(1, -1).reshape(-1, CHANNELS)


def forward_and_backward(layer: ABN, x: torch.Tensor, dz: torch.Tensor) -> list[torch.Tensor]:
    """z, dx, dweight, dbias and the running statistics."""
    x = x.clone().requires_grad_()
    z = layer(x)
    gradients = torch.autograd.grad(z, [x, layer.weight, layer.bias], dz)
    return [z.detach(), *gradients, layer.running_mean, layer.running_var]


def share(rank: int, strategy: str, activation: str, minibatches: list[list[tuple]], group_of: list[list[int]]) -> list:
    """One rank's part of minibatches that follow each other, each of given shapes; the results of the last."""
    group = None
    for members in group_of:
        new_group = dist.new_group(members)
        group = new_group if rank in members else group
    for shapes in minibatches:
        layer = layer_of(strategy, activation=activation, sync=True, group=group)
        results = forward_and_backward(layer, *values_of(shapes[rank]))
    return [t.numpy() for t in results]


# The last minibatch is compared. Rank 1 has as many crops in it as in the first, the other ranks do not.
CROPS = [[(crops, CHANNELS, 3, 4) for crops in minibatch] for minibatch in ([2, 1, 3], [4, 1, 2])]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    "activation, minibatches, group_of",
    [("leaky_relu", CROPS, []), ("tanh", CROPS, [[0, 2], [1]]), ("leaky_relu", [SHAPES], [])],
    ids=["all", "a given group", "ranks with one value per channel or none"],
)
def test_ranks_with_unequal_counts_equal_one_process(ranks, strategy, activation, minibatches, group_of):
    answers = ranks.run(share, strategy, activation, minibatches, group_of)
    results = [[torch.from_numpy(t) for t in r] for r in answers]
    for members in group_of or [[0, 1, 2]]:
        parts = [values_of(minibatches[-1][r]) for r in members]
        x, dz = (torch.cat([*map(rows, arrays)]) for arrays in zip(*parts, strict=True))
        expected = forward_and_backward(layer_of(strategy, activation=activation), x, dz)
        z, dx, dweight, dbias, *statistics = zip(*(results[r] for r in members), strict=True)
        assert_close([torch.cat([*map(rows, z)]), torch.cat([*map(rows, dx)]), sum(dweight), sum(dbias)], expected[:4])
        for ours, statistic in zip(statistics, expected[4:], strict=True):
            assert_close([*ours], [statistic] * len(members), rtol=1e-12, atol=1e-12)


def renewed(rank: int) -> list:
    network = nn.Sequential(layer_of("inplace", sync=True))
    renew_statistics(network, [values_of(shape)[0] for shape in (SHAPES[rank], SHAPES[0])])
    return [network[0].running_mean.numpy(), network[0].running_var.numpy()]


def test_statistics_are_renewed_where_a_rank_has_no_values(ranks):
    first, second = torch.cat([rows(values_of(shape)[0]) for shape in SHAPES]), rows(values_of(SHAPES[0])[0])
    second = second.repeat(WORLD_SIZE, 1)
    expected = [(first.mean(0) + second.mean(0)) / 2, (first.var(0) + second.var(0)) / 2]
    for statistics in ranks.run(renewed):
        assert_close([torch.from_numpy(t) for t in statistics], expected)


def caught(rank: int, shapes: list[tuple[int, ...]]) -> str:
    """The error that a program catches in its second step; the third step works again."""
    layer = layer_of("inplace", sync=True)

    def step(x: Tensor, dz: Tensor) -> None:
        layer(x).backward(dz)

    step(*values_of(SHAPES[0]))
    before = [layer.running_mean.clone(), layer.running_var.clone()]
    with pytest.raises(ValueError) as raised:
        step(*values_of(shapes[rank]))
    assert all(map(torch.equal, before, (layer.running_mean, layer.running_var)))
    step(*values_of(SHAPES[0]))
    assert layer.num_batches_tracked == 2
    return str(raised.value)


@pytest.mark.parametrize(
    "shapes, reason",
    [
        (SHAPES[1:] + SHAPES[2:], "over all ranks of its group, but they have [1, 0, 0]"),
        (SHAPES[2:] * 3, "over all ranks of its group, but they have [0, 0, 0]"),
        (((2, CHANNELS + 1), *SHAPES[:1] * 2), "expected (N, 5"),
    ],
)
def test_a_refusal_reaches_every_rank_in_any_step(ranks, shapes, reason):
    """Programs that catch it are not left waiting, and the group works on."""
    first, *errors = ranks.run(caught, [*shapes])
    message = first if "they have" in reason else "a synchronised norm: rank 0 of its group refused its input"
    assert reason in first and all(error.startswith(message) for error in errors), (first, errors)


def reads_of_a_step(rank: int, strategy: str) -> list[str]:
    layer, (x, dz) = layer_of(strategy, sync=True), values_of(SHAPES[0])
    with host_reads() as reads:
        layer(x.requires_grad_()).backward(dz)
    return reads


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_layer_reads_nothing_but_the_counts_which_have_arrived_on_a_cpu(ranks, strategy):
    for (read,) in ranks.run(reads_of_a_step, strategy):
        assert "gathered_moments" in read


def needs_no_other_rank(rank: int) -> bool:
    """On one rank alone, so any collective would hang, since the others do not join."""
    if rank == 1:
        forward_and_backward(layer_of("inplace", sync=True).eval(), *values_of(SHAPES[0]))
    return True


def test_running_statistics_need_no_other_rank_and_copies_share_the_group(ranks):
    assert ranks.run(needs_no_other_rank) == ranks.run(copies_share_the_group) == [True] * WORLD_SIZE


def copies_share_the_group(rank: int) -> bool:
    layer = InPlaceABN(CHANNELS, sync=True, group=dist.new_group([0, 1, 2]))
    return {copy.deepcopy(layer).group, AveragedModel(nn.Sequential(layer)).module[0].group} == {layer.group}


def outside_its_group(rank: int) -> None:
    group = dist.new_group([0])
    layer_of("inplace", sync=True, group=group)(values_of(SHAPES[0])[0])


def test_a_rank_outside_the_given_group_is_told(ranks):
    first, *errors = ranks.run(outside_its_group)
    assert first is None
    assert all(isinstance(error, ValueError) and "not in the process group" in str(error) for error in errors), errors


def test_conversion_keeps_the_layers_and_reports_every_norm():
    from torchvision.ops import FrozenBatchNorm2d  # here, because every rank imports this module

    class Own(InPlaceABN):
        pass

    ours = [InPlaceABN(3), ABN(3, activation="elu"), CheckpointedABN(3), Own(3), InPlaceABNSync(3)]
    unconverted = [
        nn.BatchNorm2d(3),
        nn.SyncBatchNorm(3),
        FrozenBatchNorm2d(3),
        nn.InstanceNorm2d(3),
        nn.GroupNorm(1, 3),
    ]
    network, reports = nn.Sequential(*ours, *unconverted, nn.Conv2d(3, 3, 1)), []
    parameters = [*network.parameters()]
    assert InPlaceABNSync.convert(network, report=reports.append) is network
    assert list(network)[:5] == ours and all(layer.sync for layer in ours)
    assert all(a is b for a, b in zip(network.parameters(), parameters, strict=True))
    assert [type(layer) for layer in ours] == [InPlaceABNSync, ABN, CheckpointedABN, Own, InPlaceABNSync]
    (report,) = reports
    assert list(report.replaced) == ["0", "1", "2", "3", "4"] and list(report.kept) == ["5", "6", "7"]
    assert type(InPlaceABNSync.convert(InPlaceABN(3))) is InPlaceABNSync


def test_without_processes_a_synchronised_layer_is_alone():
    x, dz = values_of(SHAPES[0])
    assert all(map(torch.equal, *(forward_and_backward(layer_of("inplace", sync=s), x, dz) for s in (True, False))))
    assert isinstance(InPlaceABNSync(CHANNELS), InPlaceABN) and InPlaceABNSync(CHANNELS).sync


def loss_of(network: nn.Module, images: Tensor) -> Tensor:
    return network(images).square().mean()


def gradients(network: nn.Module, images: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss_of(network, images), [p for p in network.parameters() if p.requires_grad]))


def assert_same(tensors: list[Tensor], expected: list[Tensor], tolerance: float = 1e-12) -> None:
    largest = max(gradient.abs().max().item() for gradient in expected)
    torch.testing.assert_close(tensors, expected, rtol=0, atol=tolerance * max(1.0, largest))


def _sharded(rank: int) -> list[list[Tensor]]:
    """Gradients of a plain network and of prepared ones, the second within a budget: the last of three steps."""
    results = []
    for network in (*pair(small()), recompute_activations(small(), budget=0.6)):
        for block in network:
            fully_shard(block, reshard_after_forward=True)
        fully_shard(network)
        for _ in range(3):
            network.zero_grad()
            loss_of(network, IMAGES * (rank + 1)).backward()
        results.append([parameter.grad.full_tensor() for parameter in network.parameters()])
    return results


@FSDP2_ON_CPUS
def test_parameters_that_fsdp_frees_are_copied_for_what_follows(ranks):
    """FSDP has freed a norm's parameters when the layer after it asks for the norm's output."""
    for expected, tensors, within in ranks.run(_sharded):
        assert_same(tensors, expected)
        assert_same(within, expected)


class Synchronised(nn.BatchNorm2d):
    """Calls the function behind `nn.SyncBatchNorm`, which itself refuses CPUs."""

    def forward(self, x: Tensor) -> Tensor:
        group = dist.group.WORLD
        return SyncBatchNorm.apply(
            x, self.weight, self.bias, self.running_mean, self.running_var, self.eps, 0.1, group, dist.get_world_size()
        )


def _synchronised(rank: int) -> list[tuple[list[Tensor], list[Tensor], list[int]]]:
    """Gradients and kept bytes of prepared and plain networks with synchronised norms, then with frozen biases."""
    library = torch.library.Library("aten", "IMPL")  # CPUs lack these kernels
    dims = [0, 2, 3]
    kernels = {  # the last three could be any functions
        "batch_norm_stats": lambda x, eps: (x.mean(dims), torch.rsqrt(x.var(dims, unbiased=False) + eps)),
        "batch_norm_elemt": lambda x, w, b, mean, invstd, eps: F.batch_norm(x, mean, invstd**-2, w, b, eps=1e-30),
        "batch_norm_gather_stats_with_counts": lambda x, means, invstds, *rest: (means.mean(0), invstds.mean(0)),
        "batch_norm_backward_reduce": lambda dy, x, *rest: tuple((dy * x**i).sum(dims) for i in range(4)),
        "batch_norm_backward_elemt": lambda dy, x, *rest: dy * x,
    }
    for name, kernel in kernels.items():
        library.impl(name, kernel, "CPU")
    answers = []
    for frozen in (False, True):
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Conv2d(3, 4, 3), Synchronised(4), nn.ReLU(), nn.Conv2d(4, 2, 1))
        plain[1].bias.requires_grad_(not frozen)
        networks = pair(plain.double())[::-1]
        kept = [kept_bytes(network, lambda n=network: loss_of(n, IMAGES), [IMAGES]) for network in networks]
        answers.append((*(gradients(network, IMAGES * (rank + 1)) for network in networks), kept))
    return answers


def test_synchronised_norms(ranks):
    """A frozen bias is not in the node, so what follows from it is kept."""
    for answers in ranks.run(_synchronised):
        for tensors, expected, _ in answers:
            assert_same(tensors, expected, 1e-10)
        (_, _, trained), (_, _, frozen) = answers
        assert trained[0] < 0.7 * trained[1] and frozen[0] == frozen[1]


def _whole_and_share(rank: int) -> list:
    """Gradients and statistics of a rank with synchronised norms, and its share of the minibatch."""
    network, _ = reversible.twins("sequence", partial(reversible.additive, norm=partial(InPlaceABN, sync=True)))
    parallel = DistributedDataParallel(network)
    parallel(reversible.IMAGES.repeat(2, 1, 1, 1).split([1, 2, 3])[rank]).square().sum().backward()
    return [t.detach().numpy() for t in (*(p.grad for p in network.parameters()), *network.buffers())]


def test_reversible_modules_with_synchronised_norms_are_one_network(ranks):
    _, network = reversible.twins("sequence", reversible.additive)
    (network(reversible.IMAGES.repeat(2, 1, 1, 1)).square().sum() / WORLD_SIZE).backward()
    expected = dict(enumerate([*(p.grad for p in network.parameters()), *network.buffers()]))
    for result in ranks.run(_whole_and_share):
        reversible.assert_same(dict(enumerate(map(torch.from_numpy, result))), expected, 1e-10)
