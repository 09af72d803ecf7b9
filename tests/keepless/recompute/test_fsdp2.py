"""Networks that FSDP2, or FSDP1, shards, or that DDP copies."""

import warnings
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from keepless import CheckpointedABN, InPlaceABNSync, plan, recompute_activations, share_plans
from keepless.recompute.passes.plan import ByPlan, Plan
from keepless.recompute.passes.recording import Recording
from keepless.recompute.step.costs import peak_bytes
from keepless.recompute.step.dry import counted_step
from keepless.recompute.step.search import frontier
from tests.cuda import FSDP2_ON_CPUS
from tests.keepless.recompute.ahead import plans, plans_of, watched_count
from tests.keepless.recompute.networks import Beside

WORLD_SIZE, CHANNELS = 2, 16
X = torch.linspace(-1, 1, 2 * 3 * 64 * 64).sin().view(2, 3, 64, 64)


def block() -> nn.Module:
    first, second = (nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1) for _ in range(2))
    return Beside(torch.add, first, nn.GroupNorm(4, CHANNELS), nn.SiLU(), second)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [block() for _ in range(4)]
    return nn.Sequential(nn.Conv2d(3, CHANNELS, 3, padding=1), *blocks, nn.Conv2d(CHANNELS, 8, 1))


def sharded(network: nn.Sequential) -> nn.Module:
    for block in network[1:-1]:
        fully_shard(block, reshard_after_forward=True)
    return fully_shard(network)


def step(network: nn.Module, x: Tensor) -> list[Tensor]:
    """The gradients of a step, of all shards."""
    network.zero_grad(set_to_none=False)
    network(x).square().mean().backward()
    return [parameter.grad.full_tensor() for parameter in network.parameters()]


def _within_a_budget(rank: int, is_prepared_first: bool) -> tuple[bool, Plan, int]:
    """Train in a budget. Returns: equal to plain FSDP2's gradients?, the plan, bytes of the peak above the plan."""
    x, plain, within = X * (rank + 1), sharded(network()), network()
    if is_prepared_first:
        within = sharded(recompute_activations(within, budget=0.5, example=x))
    else:
        within = recompute_activations(sharded(within), budget=0.5)
    same = [list(map(torch.equal, step(within, x), step(plain, x))) for _ in range(4)]
    share_plans(within)  # the ranks' times differ, and their plans may
    same += [list(map(torch.equal, step(within, x), step(plain, x))) for _ in range(2)]
    (size,) = plans_of(within).recent
    plan = size.plan

    def holding() -> None:
        y = within(x)  # a plan counts it
        y.square().mean().backward()

    peak = peak_bytes(holding, "cpu")
    return (
        all(map(all, same)) and watched_count(within) == 1 and size.coming is None,
        replace(plan, calls=len(plan.calls)),
        peak - plan.peak,
    )


@FSDP2_ON_CPUS
@pytest.mark.parametrize("is_prepared_first", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_sharded_network_follows_one_plan_on_all_ranks(ranks, is_prepared_first):
    """FSDP's own bytes come on top: gathered parameters, gradients and their sums, of two blocks at a time."""
    (same, plan, beyond), (also_same, other_plan, _) = ranks.run(_within_a_budget, is_prepared_first)
    assert same and also_same and plan == other_plan
    assert plan.peak < 0.51 * plan.plain
    assert 0 < beyond < 6 * sum(parameter.nbytes for parameter in block().parameters())


def _read_by_another_unit(rank: int, wrapper: str, norm: str) -> bool:
    """Whether a prepared network has the gradients of a plain one, both with each norm as a unit of FSDP's."""
    wrap = partial(FullyShardedDataParallel, device_id=torch.device("cpu")) if wrapper == "fsdp1" else fully_shard
    layers = {"checkpoint": lambda: [CheckpointedABN(8)], "group": lambda: [nn.GroupNorm(2, 8), nn.SiLU()]}[norm]
    gradients = []
    for prepare in (recompute_activations, nn.Sequential):
        torch.manual_seed(0)
        norms = [wrap(nn.Sequential(*layers())) for _ in range(3)]
        wrapped = wrap(nn.Sequential(nn.Conv2d(8, 8, 3), *norms, nn.Conv2d(8, 4, 1)))
        prepare(wrapped)(torch.randn(2, 8, 9, 9)).square().mean().backward()
        shards = [parameter.grad for parameter in wrapped.parameters()]
        gradients.append([shard.to_local() if wrapper == "fsdp2" else shard for shard in shards])
    return all(map(torch.equal, *gradients))


@FSDP2_ON_CPUS
@pytest.mark.parametrize("wrapper, norm", [("fsdp2", "checkpoint"), ("fsdp1", "checkpoint"), ("fsdp1", "group")])
def test_a_convolution_reads_the_output_of_a_norm_whose_parameters_are_freed(ranks, wrapper, norm):
    assert ranks.run(_read_by_another_unit, wrapper, norm) == [True, True]


def _within_a_budget_by_fsdp1(rank: int) -> tuple[bool, list[str]]:
    """Whether a network that FSDP1 has sharded follows a plan with the plain one's gradients; and warnings."""
    gradients = []
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for budget in (None, 0.8):
            torch.manual_seed(0)
            layers = [part for _ in range(4) for part in (nn.Linear(32, 32), nn.SiLU())]
            wrapped = FullyShardedDataParallel(nn.Sequential(*layers), device_id=torch.device("cpu"))
            if budget is not None:
                recompute_activations(wrapped, budget=budget)
            for _ in range(4):
                wrapped.zero_grad()
                wrapped(torch.ones(64, 32) * (rank + 1)).square().mean().backward()
            gradients.append([parameter.grad for parameter in wrapped.parameters()])
    is_planned = watched_count(wrapped) == 1 and plans_of(wrapped).recent[0].plan is not None
    return all(map(torch.equal, *gradients)) and is_planned, [
        str(warning.message) for warning in warned if "plan" in str(warning.message)
    ]


@FSDP2_ON_CPUS
def test_a_network_sharded_by_fsdp1_is_planned(ranks):
    assert ranks.run(_within_a_budget_by_fsdp1) == [(True, [])] * 2


@pytest.mark.parametrize("size", [64, 16])
def test_copies_of_parameters_are_planned(size):
    """FSDP frees parameters after each use, so recipes need copies. None are made of large ones."""
    plain, x = network(), X[..., :size, :size].contiguous()
    traced = counted_step(plain, (x,), {}, copy_parameters=True)
    for parameter in plain.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def planned_step(plan: Plan) -> None:
        with Recording(ByPlan(plan), copy_parameters=True, inputs=[x]):
            result = plain(x)
        result.square().mean().backward()

    for choice in frontier(traced)[-4:]:  # in large images, convolutions are computed again
        run = partial(planned_step, choice.plan(traced))
        run()
        assert abs(peak_bytes(run, "cpu") - choice.peak) < 64


def _room_of_gradients(rank: int) -> int:
    """Bytes of gradients that plans of a network without gradients count on. It keeps the lowest budget among them."""
    network_in_shards = sharded(network())
    planned = plan(network_in_shards, X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        recompute_activations(network_in_shards, budget=planned.least, example=X)
    return planned.gradients


@FSDP2_ON_CPUS
def test_budgets_of_a_sharded_network_use_no_room_of_gradients(ranks):
    assert ranks.run(_room_of_gradients) == [0, 0]


PARALLEL = {
    "inside": {},
    "outside": {},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
    "sizes": {},  # of inputs differ in one step, and statistics are synchronised
}


class Unused(nn.Sequential):
    """Its first layer is not used in each step."""

    skips = False

    def forward(self, x: Tensor) -> Tensor:
        for layer in [*self][3 * self.skips :]:
            x = layer(x)
        return x


def _watched_in_ddp(rank: int, name: str) -> tuple[bool, list[int], list[str]]:
    """Whether steps are those of plain DDP, the plans, and warnings that there is none."""
    states = []
    norm = InPlaceABNSync if name == "sizes" else nn.BatchNorm1d
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for is_prepared in (False, True):
            torch.manual_seed(0)
            module = Unused(*[part for _ in range(4) for part in (nn.Conv1d(16, 16, 1), norm(16), nn.GELU())])
            if is_prepared and name != "outside":
                recompute_activations(module, budget=0.85)
            network = DistributedDataParallel(module, **PARALLEL[name])
            if is_prepared and name == "outside":
                recompute_activations(network, budget=0.85)
            for number in range(5):
                module.skips = name == "unused" and number % 2 == 1
                x = torch.linspace(-1, 1, 8 * 16 * 32).sin().view(8, 16, 32) * (rank + number + 1)
                network.zero_grad()
                network(x[..., : 9 if (name, number, rank) == ("sizes", 1, 1) else 32]).square().mean().backward()
                gradients = [parameter.grad for parameter in module.parameters()]
                states.append(gradients + [buffer.clone() for buffer in module.buffers()])
    prepared = network if name == "outside" else module
    pairs = [pair for steps in zip(states[:5], states[5:], strict=True) for pair in zip(*steps, strict=True)]
    is_same = all(expected is actual or torch.equal(actual, expected) for expected, actual in pairs)
    texts = [str(warning.message) for warning in warned]
    return is_same, plans(prepared), [text for text in texts if "no plan" in text]


@pytest.mark.parametrize("name", PARALLEL)
def test_a_network_within_ddp_is_watched_without_further_communication(ranks, name):
    for same, planned, texts in ranks.run(_watched_in_ddp, name):
        assert same and planned and not texts, (planned, texts)
