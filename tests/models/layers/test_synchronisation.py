"""Synchronised layers: several processes that share a minibatch against one process with all of it."""

import copy
import logging
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from models.layers import ABN, CheckpointedABN, InPlaceABN, InPlaceABNSync, layer_health, recompute_activations
from tests.host_reads import host_reads
from tests.norms import STRATEGIES
from tests.ranks import Ranks

WORLD_SIZE = 3
CHANNELS = 5


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    started = Ranks(WORLD_SIZE, tmp_path_factory.mktemp("ranks"))
    yield started
    started.stop()


def layer_of(strategy: str, **options) -> ABN:
    layer = STRATEGIES[strategy](CHANNELS, **options).double()
    with torch.no_grad():
        layer.weight.copy_(torch.linspace(-1.5, 1.4, CHANNELS))
        layer.bias.copy_(torch.linspace(-0.5, 0.5, CHANNELS))
    return layer


def minibatch(crops: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(crops)
    x, dz = torch.randn(2, crops, CHANNELS, 3, 4, generator=generator, dtype=torch.float64).unbind()
    return 2 * x + 30, dz


def forward_and_backward(layer: ABN, x: torch.Tensor, dz: torch.Tensor) -> list[torch.Tensor]:
    """z, dx, dweight, dbias and the running statistics."""
    x = x.clone().requires_grad_()
    z = layer(x)
    gradients = torch.autograd.grad(z, [x, layer.weight, layer.bias], dz)
    return [z.detach(), *gradients, layer.running_mean, layer.running_var]


def share(rank: int, strategy: str, activation: str, crops: list[int], group_of: list[list[int]]):
    """One rank's part of the minibatch of its group."""
    group = None
    for members in group_of:
        made = dist.new_group(members)
        group = made if rank in members else group
    mine = next((members for members in group_of if rank in members), list(range(len(crops))))
    x, dz = minibatch(sum(crops[r] for r in mine))
    own = mine.index(rank)
    x, dz = (t.split([crops[r] for r in mine])[own] for t in (x, dz))
    layer = layer_of(strategy, activation=activation, sync=True, group=group)
    return [t.numpy() for t in forward_and_backward(layer, x, dz)]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    "activation, group_of",
    [("leaky_relu", []), ("tanh", [[0, 2], [1]])],
    ids=["all", "a given group"],
)
def test_ranks_with_unequal_counts_equal_one_process(ranks, strategy, activation, group_of):
    crops = [2, 1, 3]
    results = [[torch.from_numpy(t) for t in r] for r in ranks.run(share, strategy, activation, crops, group_of)]
    for members in group_of or [[0, 1, 2]]:
        x, dz = minibatch(sum(crops[r] for r in members))
        expected = forward_and_backward(layer_of(strategy, activation=activation), x, dz)
        z, dx, dweight, dbias, running_mean, running_var = zip(*(results[r] for r in members), strict=True)
        joint = [torch.cat(z), torch.cat(dx), sum(dweight), sum(dbias)]
        for ours, theirs in zip(joint, expected[:4], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)
        for statistics, theirs in zip((running_mean, running_var), expected[4:], strict=True):
            for ours in statistics:
                torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def with_shapes(rank: int, shapes: list[tuple[int, ...]]) -> torch.Tensor:
    """Pass a different shape on every rank; the group still works even if that raised."""
    layer = layer_of("inplace", sync=True)
    try:
        return layer(torch.randn(shapes[rank], dtype=torch.float64)).sum()
    finally:
        x, dz = minibatch(2)
        forward_and_backward(layer, x, dz)
        assert layer.num_batches_tracked == 1


@pytest.mark.parametrize("values", [0, 1])
def test_a_rank_with_too_few_values_raises_the_same_error_on_every_rank(ranks, values):
    shapes = [(2, CHANNELS, 3, 3), (values, CHANNELS, 1, 1), (2, CHANNELS, 3, 3)]
    errors = ranks.run(with_shapes, shapes)
    assert all(isinstance(error, ValueError) for error in errors), errors
    assert len({str(error) for error in errors}) == 1
    assert f"at least two values per channel on every rank of its group, but rank 1 has {values}" in str(errors[0])


def test_a_rank_that_refuses_its_input_does_not_leave_the_others_waiting(ranks):
    errors = ranks.run(with_shapes, [(2, CHANNELS, 3, 3), (2, CHANNELS + 1, 3, 3), (2, CHANNELS, 3, 3)])
    assert all(isinstance(error, ValueError) for error in errors), errors
    assert f"expected (N, {CHANNELS}" in str(errors[1])
    assert "rank 1 has 0" in str(errors[0]) and str(errors[0]) == str(errors[2])


def reads_of_steps(rank: int, strategy: str, crops: list[list[int]]) -> list[int]:
    """Host reads of each forward and backward pass, with crops[step][rank] crops."""
    network = nn.Sequential(*(layer_of(strategy, sync=True, group=dist.new_group([0, 1, 2])) for _ in range(3)))
    for layer in network[1:]:
        layer.group = network[0].group
    counts = []
    for each in crops:
        with host_reads() as reads:
            network(minibatch(each[rank])[0].requires_grad_()).sum().backward()
        counts.append(len(reads))
    return counts


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_layer_waits_for_the_device_after_the_first_step(ranks, strategy):
    steps = [[2, 2, 2], [2, 2, 2], [2, 3, 2], [2, 3, 1]]
    # Once for all layers and each number of values that the rank did not have before.
    expected = [[1, 0, 0, 0], [1, 0, 1, 0], [1, 0, 0, 1]]
    assert ranks.run(reads_of_steps, strategy, steps) == expected


def share_of_the_second(rank: int, crops: list[list[int]]) -> list:
    """As `share`, of a minibatch that follows another one."""
    share(rank, "inplace", "leaky_relu", crops[0], [])
    return share(rank, "inplace", "leaky_relu", crops[1], [])


def test_statistics_are_right_when_only_another_ranks_count_changes(ranks):
    crops = [2, 4, 1]
    results = [torch.from_numpy(r[0]) for r in ranks.run(share_of_the_second, [[2, 1, 3], crops])]
    expected = forward_and_backward(layer_of("inplace"), *minibatch(sum(crops)))[0]
    torch.testing.assert_close(torch.cat(results), expected, rtol=0, atol=1e-10)


def needs_no_other_rank(rank: int) -> bool:
    """A different one on each rank, so any collective would hang, since the others do not join."""
    if rank == 0:
        layer = partial(InPlaceABN, sync=True)
        network = nn.Sequential(nn.Conv2d(3, 4, 3), layer(4), nn.Conv2d(4, 4, 3), layer(4))
        return set(layer_health(network, torch.randn(2, 3, 8, 8))) > {"smallest_gamma"}
    if rank == 1:
        forward_and_backward(layer_of("inplace", sync=True).eval(), *minibatch(2))
    return True


def test_running_statistics_and_layer_health_need_no_other_rank(ranks):
    assert ranks.run(needs_no_other_rank) == [True] * WORLD_SIZE


def copies(rank: int) -> list[bool]:
    layer = InPlaceABN(CHANNELS, sync=True, group=dist.new_group([0, 1, 2]))
    return [
        copy.deepcopy(layer).group is layer.group,
        AveragedModel(nn.Sequential(layer)).module[0].group is layer.group,
    ]


def test_copies_share_the_group(ranks):
    assert ranks.run(copies) == [[True, True]] * WORLD_SIZE


def small_network(strategy: str, **options) -> nn.Module:
    torch.manual_seed(0)
    convolutions = nn.Conv2d(3, CHANNELS, 3, padding=1), nn.Conv2d(CHANNELS, 4, 3)
    network = nn.Sequential(convolutions[0], layer_of(strategy, **options), convolutions[1])
    return recompute_activations(network).double()


def step(network: nn.Module, rank: int | None = None) -> list[torch.Tensor]:
    """Gradients of a minibatch, or of one rank's share of it."""
    images = torch.randn(2 * WORLD_SIZE, 3, 6, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    network(images if rank is None else images.chunk(WORLD_SIZE)[rank]).square().mean().backward()
    return [p.grad for p in network.parameters()]


def parallel_step(rank: int, strategy: str) -> list:
    network = DistributedDataParallel(small_network(strategy, sync=True))
    return [gradient.numpy() for gradient in step(network, rank)]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_distributed_data_parallel_equals_one_process(ranks, strategy):
    expected = step(small_network(strategy))
    for gradients in ranks.run(parallel_step, strategy):
        for ours, theirs in zip(gradients, expected, strict=True):
            torch.testing.assert_close(torch.from_numpy(ours), theirs, rtol=0, atol=1e-10)


def outside_its_group(rank: int) -> None:
    group = dist.new_group([0])
    layer_of("inplace", sync=True, group=group)(minibatch(2)[0])


def test_a_rank_outside_the_given_group_is_told(ranks):
    first, *others = ranks.run(outside_its_group)
    assert first is None
    assert all(isinstance(error, ValueError) and "not in the process group" in str(error) for error in others), others


def converted_step(rank: int) -> list:
    network = DistributedDataParallel(InPlaceABNSync.convert(small_network("inplace")))
    return [gradient.numpy() for gradient in step(network, rank)]


def test_converted_networks_are_synchronised(ranks):
    for ours, expected in zip(ranks.run(converted_step), ranks.run(parallel_step, "inplace"), strict=True):
        assert all((a == b).all() for a, b in zip(ours, expected, strict=True))


def test_conversion_keeps_the_layers_and_their_parameters():
    network = small_network("inplace")
    layer, parameters = network[1], list(network.parameters())
    assert InPlaceABNSync.convert(network) is network and network[1] is layer
    assert type(layer) is InPlaceABNSync and layer.sync
    assert all(a is b for a, b in zip(network.parameters(), parameters, strict=True))
    assert type(InPlaceABNSync.convert(InPlaceABN(3))) is InPlaceABNSync


def test_conversion_reports_every_norm(caplog):
    from torchvision.ops import FrozenBatchNorm2d  # here, because every rank imports this module

    class Own(InPlaceABN):
        pass

    ours = [InPlaceABN(3), ABN(3, activation="elu"), CheckpointedABN(3), Own(3), InPlaceABNSync(3)]
    others = [nn.BatchNorm2d(3), nn.SyncBatchNorm(3), FrozenBatchNorm2d(3), nn.InstanceNorm2d(3), nn.GroupNorm(1, 3)]
    network, reports = nn.Sequential(*ours, *others, nn.Conv2d(3, 3, 1)), []
    InPlaceABNSync.convert(network, report=reports.append)
    assert list(network)[:5] == ours and all(layer.sync for layer in ours)
    assert [type(layer) for layer in ours] == [InPlaceABNSync, ABN, CheckpointedABN, Own, InPlaceABNSync]
    (report,) = reports
    assert list(report.replaced) == ["0", "1", "2", "3", "4"] and list(report.kept) == ["5", "6", "7"]
    assert report.replaced["0"] == "InPlaceABN(leaky_relu) -> InPlaceABNSync(leaky_relu, sync=True)"
    assert report.replaced["1"] == "ABN(elu) -> ABN(elu, sync=True)"
    assert report.kept["5"].startswith("BatchNorm2d: ") and "convert_sync_batchnorm" in report.kept["5"]
    assert "its own process_group" in report.kept["6"] and "FrozenBatchNorm2d" in report.kept["7"]

    with caplog.at_level(logging.INFO):
        InPlaceABNSync.convert(nn.Sequential(ABN(3)))
        InPlaceABNSync.convert(nn.BatchNorm2d(3))
    assert [record.levelno for record in caplog.records] == [logging.INFO, logging.WARNING]
    assert "(the module itself)" in caplog.records[1].getMessage()


def test_without_processes_a_synchronised_layer_is_alone():
    x, dz = minibatch(3)
    ours = forward_and_backward(layer_of("inplace", sync=True), x, dz)
    for result, expected in zip(ours, forward_and_backward(layer_of("inplace"), x, dz), strict=True):
        assert torch.equal(result, expected)
    assert isinstance(InPlaceABNSync(CHANNELS), InPlaceABN) and InPlaceABNSync(CHANNELS).sync
