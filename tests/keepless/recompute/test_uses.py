"""Small networks that compute activations again: bytes, operators, and whatever else surrounds a forward pass."""

import copy
import gc
import pickle
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad
from torch.overrides import _get_current_function_mode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from keepless import CheckpointedABN, recompute_activations, recomputing, report, undo
from keepless.saved import kept_bytes
from keepless.torch_internals import current_hooks, push_hooks
from models.blocks import Convolutions, IdentityResidualBlock
from tests.keepless.recompute.ahead import After, gradients, pair, plans_of
from tests.keepless.recompute.networks import Beside
from tests.norms import CHECKPOINTED, STRATEGIES


def gated(y: Tensor) -> Tensor:
    return y * y.mean((2, 3), keepdim=True).sigmoid()


def block() -> nn.Module:
    first = nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4)
    return Beside(torch.add, *first, After(nn.SiLU(), gated), nn.Conv2d(4, 4, 1))


IMAGES = torch.linspace(-1, 1, 2 * 3 * 10 * 10, dtype=torch.float64).sin().view(2, 3, 10, 10)


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), block(), block(), nn.Conv2d(4, 2, 1)).double()


@pytest.fixture
def networks() -> tuple[nn.Module, nn.Module]:
    return pair(small())


@pytest.fixture(params=["standard", "budget", *CHECKPOINTED])
def any_networks(request) -> tuple[nn.Module, nn.Module]:
    """Plain and prepared; of checkpointed layers nothing but their outputs is computed again."""
    if request.param in CHECKPOINTED:
        norm = STRATEGIES[request.param]
        block = IdentityResidualBlock(Convolutions(4, (4, 8)), norm)
        network = nn.Sequential(nn.Conv2d(3, 4, 3), block, norm(8), nn.Conv2d(8, 2, 1), nn.Sigmoid())
        return pair(network.double(), checkpointed_only=True)
    plain, prepared = pair(small(), budget=0.5 if request.param == "budget" else None)
    for _ in range(2):  # a plan is in force
        assert all(map(torch.equal, gradients(prepared, IMAGES), gradients(plain, IMAGES)))
    return plain, prepared


class Operators(TorchDispatchMode):
    """Context that counts calls of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))


def test_each_value_is_computed_once_per_backward_pass(networks):
    loss = networks[1](IMAGES).square().mean()
    for retain in (True, True, False):
        with Operators() as operators:
            loss.backward(retain_graph=retain)
        assert [operators.calls[name] for name in ("native_batch_norm", "silu", "native_group_norm")] == [2, 2, 2]


@pytest.mark.parametrize("activation", [nn.ReLU6(), nn.ReLU6(True), nn.LeakyReLU(0.1), nn.Hardtanh(-1, 1)], ids=str)
def test_an_activation_overwrites_what_only_it_reads(activation):
    """Its gradient follows from its result, so nothing else reads the normalised values."""
    network = recompute_activations(nn.Sequential(nn.BatchNorm2d(3), activation, nn.Conv2d(3, 3, 1)))
    loss = network(torch.randn(2, 3, 4, 4, requires_grad=True)).sum()
    name = "leaky_relu" if isinstance(activation, nn.LeakyReLU) else "hardtanh"
    with Operators() as operators:
        loss.backward()
    assert operators.calls["native_batch_norm"] == operators.calls[name + "_"] == 1
    assert operators.calls[name] == operators.calls["clone"] == operators.calls["copy_"] == 0


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.filterwarnings("ignore:no plan keeps|a part of the network")
@pytest.mark.filterwarnings("ignore:the budget is ignored")
def test_checkpoints_outside_save_their_bytes(any_networks, use_reentrant):
    """A reentrant one repeats the forward pass inside of a backward pass."""
    results, kept = [], []
    for network in any_networks:

        def loss(n=network) -> Tensor:
            x = IMAGES.clone().requires_grad_()
            return checkpoint(n, x, use_reentrant=use_reentrant).square().mean()

        for _ in range(4):
            network.zero_grad()
            loss().backward()
        results.append([parameter.grad for parameter in network.parameters()])
        kept.append(kept_bytes(network, loss, []))
    assert all(map(torch.equal, *results))
    assert kept[0] == kept[1]
    assert "no plan" not in {line.why for line in report(any_networks[1]).lines}


def test_no_gradients_no_cost(networks):
    for mode in (torch.no_grad, torch.inference_mode):
        outputs, calls = [], []
        for network in networks:
            with mode(), Operators() as operators:
                outputs.append(network(IMAGES))
            calls.append(operators.calls)
        assert torch.equal(*outputs) and calls[0] == calls[1]


class Interrupted(nn.Sequential):
    """Raises in its fourth forward pass, as Ctrl-C does, and is then repaired."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.calls += 1
        if self.calls == 4:
            raise KeyboardInterrupt
        return y


@pytest.mark.parametrize("options", [{}, {"checkpointed_only": True}, {"budget": 1.0}, {"budget": "1GiB"}], ids=str)
@pytest.mark.parametrize("nested, checkpoints", [(False, 0), (True, 0), (False, 1), (False, 2)])
@pytest.mark.filterwarnings("ignore:the budget is ignored")
def test_ctrl_c_ends_the_recording(nested, checkpoints, options):
    """A notebook may hold the traceback, which holds all variables; and a step may fit as it is.

    A checkpoint that is left removes the innermost hooks, and so ours instead of its own.
    """
    body = Interrupted(nn.Conv2d(3, 4, 1), CheckpointedABN(4), nn.SiLU(), nn.Conv2d(4, 2, 1)).double()
    plain = copy.deepcopy(body)
    run = network = recompute_activations(nn.Sequential(body) if nested else body, **options)
    for _ in range(checkpoints):
        run = partial(checkpoint, run, use_reentrant=False)
    for body.calls in range(3):
        run(IMAGES).square().mean().backward()
    body.calls = 3
    with pytest.raises(KeyboardInterrupt) as traceback:
        run(IMAGES)
    if checkpoints:  # in torch 2.11 they end only once their frames are freed
        del traceback
    w = torch.ones(3, requires_grad=True)
    y = w.sigmoid()
    alive = weakref.ref(y)
    loss = y.sin().sum()
    assert "checkpointed_only" in options or checkpoints or current_hooks() is None
    assert torch.autograd.grad(loss, w)[0] is not None
    del y, loss
    assert checkpoints or alive() is None
    network.zero_grad()
    run(IMAGES).square().mean().backward()
    new_gradients = [parameter.grad for parameter in network.parameters()]
    assert all(map(torch.equal, new_gradients, gradients(plain, IMAGES)))
    assert current_hooks() is None and _get_current_function_mode() is None


@pytest.mark.parametrize("is_before", [True, False])
def test_ctrl_c_as_a_call_gets_hooks(is_before, monkeypatch):
    """Only hooks that have been set are removed: PyTorch fails if there are none."""

    def interrupted(*hooks: Callable) -> None:
        if not is_before:
            push_hooks(*hooks)
        raise KeyboardInterrupt

    network = recompute_activations(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.SiLU(), nn.Conv2d(4, 2, 1)))
    images = torch.rand(2, 3, 4, 4)
    for _ in range(3):  # the next one has advice
        network(images).sum().backward()
    with monkeypatch.context() as patches:
        patches.setattr("keepless.recompute.passes.advised.push_hooks", interrupted)
        with pytest.raises(KeyboardInterrupt):
            network(images)
    assert current_hooks() is None
    network(images).sum().backward()


@pytest.mark.parametrize("follows", [False, True])
def test_ctrl_c_is_never_swallowed(follows, monkeypatch):
    """Python swallows it in a function that runs when an object is freed. Here it comes at every 17th call of a step.

    The step is the first, or has the advice of earlier ones.
    """
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3)
    network = nn.Sequential(*layers).double()
    recompute_activations(network)(IMAGES).sum().backward()
    swallowed: list[object] = []
    monkeypatch.setattr("sys.unraisablehook", swallowed.append)

    def is_reached(wanted: int) -> bool:
        calls = 0
        prepared = network if follows else copy.deepcopy(network)  # copies have no advice

        def interrupt(frame, event, argument) -> None:
            nonlocal calls
            callers = frame
            while event == "call" and callers.f_code.co_name not in ("enter", "leave"):  # not while hooks are set
                if (callers := callers.f_back) is None:
                    calls += 1
                    if calls == wanted:
                        raise KeyboardInterrupt
                    break

        sys.setprofile(interrupt)
        try:
            prepared(IMAGES).square().mean().backward()
        except KeyboardInterrupt:
            return True
        finally:
            sys.setprofile(None)
        return calls >= wanted

    number = 3
    while is_reached(number):
        number += 5 if follows else 17
    assert number > (100 if follows else 200) and not swallowed


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:`torch.jit:DeprecationWarning")
def test_undone_traced_and_compiled_before():
    x = IMAGES
    network = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.SiLU(), nn.Conv2d(4, 2, 1))
    plain, prepared = pair(network.double())
    traced = torch.jit.trace(prepared, x)
    assert all(map(torch.equal, gradients(traced, x), gradients(plain, x)))
    with pytest.warns(UserWarning, match="does nothing inside torch.compile"):
        recompute_activations(torch.compile(copy.deepcopy(plain), backend="eager"))  # torch 2.14 marks it
    kept = [kept_bytes(n, lambda n=n: n(x), [x]) for n in (plain, prepared)]
    assert kept_bytes(prepared, lambda: undo(prepared)(x), [x]) == kept[0] > kept[1]
    assert prepared.__dict__.keys() == plain.__dict__.keys()
    assert all(map(torch.equal, gradients(prepared, x), gradients(plain, x)))


def test_code_that_is_no_module(networks):
    """A context does what a prepared network does."""
    plain, prepared = networks

    def inside() -> Tensor:
        with recomputing():
            return plain(IMAGES)

    kept = kept_bytes(prepared, lambda: prepared(IMAGES), [IMAGES])
    assert kept_bytes(plain, inside, [IMAGES]) == kept
    assert torch.equal(inside(), plain(IMAGES))
    with torch.no_grad(), recomputing():
        assert current_hooks() is None


@pytest.mark.filterwarnings("ignore:no plan keeps")
def test_memory_is_back_after_every_step(any_networks):
    """The garbage collector need not run, not even if another size is planned, or only a part is differentiated."""
    prepared, inputs = any_networks[1], [IMAGES, IMAGES[..., 1:]]

    def living() -> int:
        return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())

    gradients(prepared, IMAGES)
    gc.collect()
    gc.disable()
    try:
        before = living()
        for images in 2 * inputs:
            loss = prepared(images).sum()  # and never a whole backward pass
            held_count = living()
            torch.autograd.grad(loss, list(prepared.parameters())[-4:], retain_graph=True)
            assert living() == held_count
            del loss
            gradients(prepared, images)
        assert living() == before
    finally:
        gc.enable()


def test_copies_and_pickles(networks):
    plain, prepared = networks
    networks_alike = [plain, copy.deepcopy(prepared), pickle.loads(pickle.dumps(prepared))]
    kept = [kept_bytes(network, lambda o=network: o(IMAGES), [IMAGES]) for network in networks_alike]
    assert max(kept[1:]) < kept[0]
    for network in networks_alike[1:]:
        assert all(map(torch.equal, gradients(network, IMAGES), gradients(plain, IMAGES)))
    assert plans_of(pickle.loads(pickle.dumps(pair(small(), budget=0.5)[1]))).budget == 0.5


def test_compiled_and_inside_of_torch_func_it_does_nothing(networks):
    plain, prepared = networks
    compiled = torch.compile(prepared, fullgraph=True, backend="eager")
    with pytest.warns(UserWarning, match="does nothing inside torch.compile") as warned:
        results = [gradients(compiled, IMAGES) for _ in range(2)]
    # The compiler has others on Python 3.13.
    assert sum(issubclass(warning.category, UserWarning) for warning in warned) == 1
    assert all(map(torch.equal, results[1], gradients(plain, IMAGES)))
    network = recompute_activations(nn.Sequential(nn.Linear(3, 3), nn.ReLU()))
    weights = {name: parameter.detach() for name, parameter in network.named_parameters()}
    gradients_of = grad(lambda weights: functional_call(network, weights, (torch.ones(1, 3),)).sum())
    assert gradients_of(weights).keys() == weights.keys()


@pytest.mark.parametrize("norm", [nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.InstanceNorm2d(4, affine=True)], ids=str)
def test_an_optimiser_may_change_what_the_backward_pass_of_a_plain_norm_does_not_read(norm):
    """Two losses with a step in between do this. The bias is copied, and so is a weight that autograd repeats first."""
    plain, prepared = pair(nn.Sequential(nn.Conv2d(3, 4, 1), norm, nn.ReLU(), nn.Conv2d(4, 2, 1)).double())

    def run(network: nn.Module, name: str = "bias") -> Tensor:
        loss = network(IMAGES).square().sum()
        with torch.no_grad():
            getattr(network[1], name).add_(1)
        return loss

    results = [torch.autograd.grad(run(network), list(network.parameters())) for network in (prepared, plain)]
    assert all(map(torch.equal, *results))
    kept = [kept_bytes(network, lambda n=network: run(n), [IMAGES]) for network in (prepared, plain)]
    copies = 2 if isinstance(norm, nn.InstanceNorm2d) else 1
    assert kept[1] - kept[0] == 2 * 4 * 10 * 10 * 8 - copies * plain[1].bias.nbytes
    if isinstance(norm, nn.BatchNorm2d):  # which keeps its weight
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            run(prepared, "weight").backward()
