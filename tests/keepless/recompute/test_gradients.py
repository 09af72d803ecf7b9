"""Gradients take memory as they come, if none is there before. Until then, plans use their room."""

import copy
import pickle
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel

from keepless import fit, plan, recompute_activations
from keepless.fit.step_memory import CountedStep
from keepless.recompute.step.costs import peak_bytes
from keepless.recompute.step.dry import Loss, rehearsed_step
from keepless.recompute.step.search import frontier
from keepless.recompute.step.simulation import plain_peak
from keepless.units import size_text
from tests.keepless.recompute.ahead import After, pair, plan_next_step, plans_of, watched_count
from tests.keepless.recompute.networks import blocks


class Parameters(nn.Module):
    """Parameters whose gradients autograd takes over, copies, adds up, or gets as parts of others."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.too, self.first, self.rest, self.once = (nn.Parameter(torch.ones(8)) for _ in range(5))
        self.turned, self.unused = nn.Parameter(torch.ones(8, 4)), nn.Parameter(torch.ones(8))
        self.rows = nn.Embedding(6, 8, sparse=True)
        self.tied = nn.Linear(8, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.frozen(self.tied(x * (self.shared + self.too)).sigmoid()) @ self.tied.weight
        x = x * torch.cat([self.first, self.rest]).view(2, 8).sum(0)
        x = x[:4] * self.turned.t() + self.rows(torch.tensor([1, 2, 3, 3], device=x.device))
        return x + self.once.expand(4, 8)


def channels_last() -> nn.Module:
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, bias=False))
    for layer in (network[0], network[-1]):
        layer.weight.data = layer.weight.data.contiguous(memory_format=torch.channels_last)
    return network


STEPS = {
    "parameters": (Parameters, (16, 8)),
    "channels last": (channels_last, (2, 3, 9, 9)),
    "layers": (lambda: nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 8)), (32, 8)),
    "recurrent": (lambda: nn.GRU(8, 16, 2), (5, 3, 8)),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_counted_step_without_gradients_has_the_bytes_of_one(name):
    """To the byte: those of a step on fake tensors that starts without gradients, and of one that has them."""
    make, shape = STEPS[name]
    with FakeTensorMode():
        network, x = make(), torch.ones(shape)
        step = rehearsed_step(network, (x,), {})
        for variant in (step.as_gradients_come(), step):
            with CountedStep() as counted:
                outputs = network(x)
                loss = Loss.apply(outputs if isinstance(outputs, Tensor) else outputs[0])
                loss.backward(torch.empty_like(loss))
            if isinstance(outputs, Tensor):
                assert plain_peak(variant) == counted.peak
            else:  # the other output is a start, too
                assert plain_peak(variant) == pytest.approx(counted.peak, rel=0.02)
        gradients = [parameter.grad for parameter in network.parameters() if parameter.grad is not None]
    assert step.gradients == sum(gradient.nbytes for gradient in gradients if gradient.layout == torch.strided) > 0


@pytest.mark.parametrize("is_real", [False, True])
def test_gradients_count_in_their_own_dtype(is_real):
    asks = After(nn.GELU(), lambda y: y if not is_real or y[0, 0] == y[0, 0] else None)  # reads a value
    network, x = nn.Sequential(nn.Linear(8, 64), asks, nn.Linear(64, 8)).bfloat16(), torch.ones(32, 8).bfloat16()
    for parameter in network.parameters():
        parameter.grad_dtype = torch.float32

    def run() -> None:
        outputs = network(x)
        outputs.square().mean().backward()

    run()
    step = rehearsed_step(network, (x,), {})
    gradients = sum(parameter.grad.nbytes for parameter in network.parameters())
    assert step.gradients == gradients and plain_peak(step) == peak_bytes(run, "cpu")
    assert is_real or fit(network, x, "2GiB").gradients == gradients


def transformer(layers: int = 4) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def half_frozen() -> nn.Module:
    network = transformer()
    network.layers[:2].requires_grad_(False)
    return network


def convolutions() -> nn.Module:
    torch.manual_seed(0)
    return blocks(6, nn.BatchNorm2d(16), nn.SiLU(), width=16)


IMAGES, TEXTS = torch.linspace(-1, 1, 3072).view(1, 3, 32, 32), torch.linspace(-1, 1, 3072).sin().view(6, 16, 32)


@pytest.mark.table
@pytest.mark.parametrize(
    ("make", "x", "share"),
    [(transformer, TEXTS, 0.75), (half_frozen, TEXTS, 0.75), (convolutions, IMAGES, 0.6)],
)
@pytest.mark.parametrize("parts", [1, 2])
def test_activations_and_gradients_stay_within_the_budget_and_all_gradients(make, x, share, parts):
    """A step after `zero_grad`, of one or of two micro-batches."""
    budget = share_of(within := make(), share, x)
    recompute_activations(within, budget=budget)
    gradients = sum(parameter.nbytes for parameter in within.parameters() if parameter.requires_grad)

    def step() -> None:
        within.zero_grad()
        for part in range(parts):
            within(x * (part + 1)).square().mean().backward()

    step(), step(), step()
    within.zero_grad()  # before the level is taken
    peak = peak_bytes(step, "cpu")
    assert 0.9 * (budget + gradients) < peak <= budget + gradients
    assert watched_count(within) == 1


@pytest.mark.parametrize("comes", [False, True])
def test_a_share_of_the_baselines_peak_is_a_share_of_the_step_as_it_runs(comes):
    """Also where gradients come during the step, whose bytes both have."""
    networks = pair(convolutions(), budget=0.6)

    def step(network: nn.Module) -> None:
        network.zero_grad(set_to_none=comes)
        network(IMAGES).square().mean().backward()

    within, step_of = networks[1], rehearsed_step(networks[0], (IMAGES,), {})
    step(within), step(within), within.zero_grad(set_to_none=comes)
    limit = 0.6 * plain_peak(step_of.as_gradients_come() if comes else step_of)
    assert 0.85 * limit < peak_bytes(partial(step, within), "cpu") <= limit  # a tensor is 0.06 of it


def test_nothing_is_recomputed_while_the_baseline_fits_into_the_room_of_gradients():
    torch.manual_seed(0)
    network = nn.Sequential(*[part for _ in range(8) for part in (nn.Linear(256, 256), nn.GELU())])
    x = torch.randn(64, 256)
    budget = int(0.8 * plain_peak(rehearsed_step(network, (x,), {})))
    coming = plan(network, x, budgets=[budget])
    for parameter in network.parameters():
        parameter.grad = torch.zeros_like(parameter)
    accumulating = plan(network, x, budgets=[budget])
    assert coming.rows[0].budget == accumulating.rows[0].budget == budget
    assert coming.rows[0].peak == coming.plain > accumulating.plain > accumulating.rows[0].peak
    assert coming.rows[0].seconds < accumulating.rows[0].seconds and accumulating.gradients == 0 < coming.gradients


def test_a_sharded_network_is_told_the_lowest_peak_with_all_its_bytes(monkeypatch):
    """FSDP holds its gradients throughout, so none of them is taken off."""
    network = convolutions()
    step = rehearsed_step(network, (IMAGES,), {})
    least = frontier(step.without_outputs())[-1].peak
    for module in ("plans", "signatures"):
        monkeypatch.setattr(f"keepless.recompute.signatures.{module}.is_sharded", lambda network: True)
    with pytest.warns(UserWarning, match=f"no plan keeps this step within .*: the lowest peak is {size_text(least)},"):
        recompute_activations(network, budget=least - 4096, example=IMAGES)(IMAGES)


def share_of(network: nn.Module, share: float, x: Tensor = IMAGES) -> int:
    """Bytes of a step's peak if gradients are there before it."""
    return int(share * plain_peak(rehearsed_step(network, (x,), {})))


def follows(network: nn.Module) -> str:
    """The kind of plan that the next pass follows."""
    signatures = plans_of(network)
    (signature,) = signatures.recent
    assert signature.coming is not None
    signatures.gradients.trained_flags(network)
    signatures.gradients.note_overlap()
    return "coming" if signatures.gradients.are_coming() else "there"


@pytest.fixture
def prepared() -> nn.Module:
    network = convolutions()
    recompute_activations(network, budget=share_of(network, 0.6))
    network(IMAGES).sum().backward()
    plan_next_step(network, IMAGES)
    network.zero_grad()
    assert follows(network) == "coming"
    return network


def test_in_doubt_a_pass_follows_the_plan_for_gradients_that_are_there(prepared):
    parameter = prepared[4].weight
    parameter.grad = torch.zeros_like(parameter)
    assert follows(prepared) == "there"
    parameter.grad = None
    handle = parameter.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    assert follows(prepared) == "there"  # an optimiser might step there, and free each gradient
    handle.remove()
    assert follows(prepared) == "coming"
    _apply_optimizer_in_backward(torch.optim.SGD, prepared.parameters(), {"lr": 0.1})
    assert follows(prepared) == "there"


def test_passes_that_await_one_backward_pass_follow_the_plan_for_gradients_that_are_there(prepared):
    """The room of the gradients is there once, and the first pass may use it."""
    for _ in range(2):
        prepared(IMAGES)  # an evaluation that records gradients, and frees its graph
        assert follows(prepared) == "coming"
    first = prepared(IMAGES)
    assert follows(prepared) == "there"
    (first.sum() + prepared(IMAGES).sum()).backward()
    prepared.zero_grad()
    assert follows(prepared) == "there"  # from now on: the next step does the same


def test_a_pass_whose_backward_pass_makes_a_graph_still_awaits_another_one(prepared):
    """As for a penalty on gradients: its graph is kept, and takes its room as long as it is."""
    score = prepared(IMAGES).sum()
    (gradient,) = torch.autograd.grad(score, prepared[0].weight, create_graph=True)
    assert follows(prepared) == "there"
    (score + gradient.square().sum() + prepared(IMAGES).sum()).backward()


def test_a_network_can_be_pickled_and_copied_while_a_pass_awaits_its_backward_pass(prepared):
    first = prepared(IMAGES).square().mean()
    copies = pickle.loads(pickle.dumps(prepared)), copy.deepcopy(prepared)
    first.backward()
    for network in copies:
        network(IMAGES).square().mean().backward()
        assert torch.equal(network[0].weight.grad, prepared[0].weight.grad)


def test_a_network_with_tied_parameters_is_planned_once(prepared):
    prepared[4].weight = prepared[1].weight
    recompute_activations(prepared, budget=0.6)
    for _ in range(5):
        prepared.zero_grad()
        for _ in range(2):
            prepared(IMAGES).square().mean().backward()
    assert watched_count(prepared) == 1


def test_each_kind_of_pass_has_advice_of_its_own_and_none_plans_again(prepared):
    signatures = plans_of(prepared)
    for _ in range(8):
        prepared.zero_grad()
        for part in range(2):
            prepared(IMAGES * (part + 1)).sum().backward()
        assert follows(prepared) == "there" and watched_count(prepared) == 1
    (signature,) = signatures.recent
    assert signature.pass_count + signature.coming.pass_count == 16
    assert signature.advice is not None and signature.coming.advice is not None
    assert {*signature.plan.flags} != {0} and signature.plan.flags != signature.coming.plan.flags


@pytest.mark.parametrize("has_views", [False, True])
def test_ddp_keeps_the_budget_whether_buckets_are_the_gradients_or_not(one_process, has_views):
    """`zero_grad` sets `.grad` to None in both, but buckets stay: where they are the gradients, those are there."""
    budget = share_of(plain := convolutions(), 0.6)
    plain, within = pair(plain, budget=budget)
    parallel = DistributedDataParallel(within, gradient_as_bucket_view=has_views)
    kinds: list[str] = []

    def step() -> None:
        parallel.zero_grad()
        parallel(IMAGES).square().mean().backward()

    step(), plan_next_step(within, IMAGES)
    within[0].register_forward_hook(lambda *_: kinds.append(follows(within)))
    for _ in range(2):
        step()
    parallel.zero_grad()
    peak = peak_bytes(step, "cpu")
    gradients = 0 if has_views else sum(parameter.nbytes for parameter in within.parameters())
    plain(IMAGES).square().mean().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(within.parameters(), plain.parameters(), strict=True))
    assert {*kinds} == {"there" if has_views else "coming"}
    assert peak <= budget + gradients


@pytest.mark.filterwarnings("ignore:a step may have taken")
def test_both_kinds_of_passes_are_planned_anew_for_a_path_that_changes():
    network = convolutions()
    late: list[bool] = []
    network[6].register_forward_hook(lambda _, __, output: output.tanh().sigmoid() if late else None)
    within = recompute_activations(network, budget=share_of(network, 0.6))
    within(IMAGES).sum().backward()
    late.append(True)
    for _ in range(3):
        within(IMAGES).sum().backward()
        within.zero_grad()
        within(IMAGES).sum().backward()
    (signature,) = plans_of(within).recent
    assert signature.coming is not None and not signature.is_due and watched_count(within) == 2


def test_a_loss_that_keeps_the_outputs_of_a_functional_network_reads_no_gradients(prepared):
    """Parameters that are results have none, and reading it would warn."""
    doubled = {name: 2 * parameter for name, parameter in prepared.named_parameters()}
    F.mse_loss(torch.func.functional_call(prepared, doubled, (IMAGES,)), torch.zeros(())).backward()
    assert all(parameter.grad is not None for parameter in prepared.parameters())
