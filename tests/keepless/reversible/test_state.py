"""Modules that change their buffers or attributes in a forward pass train as without reversibility, or are refused."""

import copy
from functools import partial
from itertools import product

import pytest
import torch
from torch import nn

from keepless import AdditiveCoupling, AffineAdapterNaive, AffineCoupling, ReversibleSequence
from keepless.reversible import checks
from tests.keepless.reversible.test_modules import FORMS, IMAGES, assert_same, step


class ActNorm(nn.Module):
    """(x + shift) * scale, of zero mean and unit variance in the first minibatch."""

    def __init__(self, values="parameters", flag="buffer", new=False):
        super().__init__()
        self.new = new
        for name, start in (("shift", torch.zeros(1)), ("scale", torch.ones(1))):
            if values == "parameters":
                self.register_parameter(name, nn.Parameter(start))
            else:
                self.register_buffer(name, start)
        if flag == "attribute":
            self.ready = False
        else:
            self.register_buffer("ready", torch.zeros((), dtype=torch.bool))

    def set(self, name, value):
        if self.new:
            setattr(self, name, nn.Parameter(value))
        else:
            getattr(self, name).copy_(value)

    @torch.no_grad()
    def initialise(self, x):
        self.set("shift", -x.mean().reshape(1))
        self.set("scale", 1 / x.std().reshape(1))
        self.ready = True if isinstance(self.ready, bool) else torch.ones_like(self.ready)

    def forward(self, x):
        if not self.ready:
            self.initialise(x)
        return (x + self.shift) * self.scale

    def inverse(self, y):
        return y / self.scale - self.shift


class Standardised(nn.Module):
    """RealNVP's batch norm: the inverse reads what the last forward pass has left in the buffers."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("std", torch.ones(()))

    def forward(self, x):
        self.mean, self.std = x.detach().mean(), x.detach().std()
        return (x - x.mean()) / x.std()

    def inverse(self, y):
        return y * self.std + self.mean


class Moving(nn.Module):
    """It subtracts a moving average, a buffer or parameter, then moves it."""

    def __init__(self, changes="nothing", parameter=False):
        super().__init__()
        self.changes, self.first, self.calls, self.cache = changes, True, 0, None
        self.register_buffer("on", torch.tensor(False))
        if parameter:
            self.mean = nn.Parameter(torch.zeros(()), requires_grad=False)
        else:
            self.register_buffer("mean", torch.zeros(()))

    def forward(self, x):
        y, mean = x - self.mean.clone(), x.detach().mean()
        (self.mean.data if self.changes == "data" else self.mean).copy_(self.mean.detach().lerp(mean, 0.5))
        self.calls += 1
        if self.changes == "toggle":
            self.on.logical_not_()
            y = y * (1 + self.on)
        elif self.changes == "calls":
            y = y * self.calls
        elif self.changes == "attribute":
            self.first = False
        elif self.changes == "cache":
            y = y if self.cache is None else y + self.cache
            self.cache = x.detach().sin()
        return y


KINDS = {
    "initialised, attribute": lambda: ActNorm("buffers", "attribute"),
    "initialised, buffer": lambda: ActNorm("buffers"),
    "each time": Standardised,
    "used before it moves": Moving,
    "used before it moves, data": lambda: Moving("data"),
    "used before it moves, attribute": lambda: Moving("attribute"),
    "used before it moves, toggle": lambda: Moving("toggle"),
    "used before it moves, calls": lambda: Moving("calls"),
    "used before it moves, cache": lambda: Moving("cache"),
}


def conv(*modules):
    return nn.Sequential(*modules, nn.Conv2d(4, 4, 1), nn.Tanh())


PLACES = {
    "F": lambda kind: [AdditiveCoupling(conv(kind()), conv()), AdditiveCoupling(conv())],
    "G": lambda kind: [AdditiveCoupling(conv()), AdditiveCoupling(conv(), conv(kind()))],
    "F and G": lambda kind: [AffineCoupling(conv(kind()), adapter=AffineAdapterNaive), AdditiveCoupling(conv(kind()))],
    "inside a chain": lambda kind: [
        AdditiveCoupling(ReversibleSequence([AdditiveCoupling(nn.Sequential(kind(), nn.Conv2d(2, 2, 1)))]))
    ],
    "inside F": lambda kind: [AdditiveCoupling(nn.Sequential(kind(), nn.Tanh(), nn.LazyBatchNorm2d()), nn.Tanh())],
    "between couplings": lambda kind: [kind(), AdditiveCoupling(conv()), kind(), kind(), AdditiveCoupling(conv())],
}
CASES = {*product(KINDS, ["F"], ["sequence"]), *product(KINDS, ["between couplings"], ["kept inputs"])}
PLACES_IN_BRANCHES, THREE_FORMS = ["F", "G", "F and G", "inside a chain"], ["sequence", "wrappers", "kept inputs"]
CASES |= {*product(["initialised, buffer"], PLACES_IN_BRANCHES, THREE_FORMS)}


@pytest.mark.parametrize("kind, place, form", sorted(CASES))
def test_gradients_and_values_equal_stored_activations(kind, place, form):
    torch.manual_seed(0)
    blocks = nn.ModuleList(PLACES[place](KINDS[kind])).double()
    plain = nn.Sequential(*copy.deepcopy(blocks))
    for module in plain.modules():
        if isinstance(module, ReversibleSequence):
            module.disable = True
    network = FORMS[form](blocks)
    for x in (IMAGES, 2 * IMAGES):
        assert_same(step(network, x), step(plain, x))
    assert_same(dict(enumerate(network.parameters())), dict(enumerate(plain.parameters())))


TO_INITIALISE = {
    "parameters": (ActNorm, "F", r"writes ActNorm.shift, .* under torch.no_grad\(\)"),
    "new parameters": (lambda: ActNorm(new=True), "G", r"writes ActNorm.shift, .* under torch.no_grad\(\)"),
    "sizes": (partial(nn.LazyConv2d, 4, 1), "inside F", r"writes the sizes of LazyConv2d, .* under torch.no_grad\(\)"),
    "with an inverse": (lambda: ActNorm("buffers"), "between couplings", r"ActNorm .*changes its .* torch.no_grad\(\)"),
}


@pytest.mark.parametrize("kind, place, message", TO_INITIALISE.values(), ids=TO_INITIALISE)
def test_modules_that_initialise_themselves_need_a_pass_without_gradients(kind, place, message):
    torch.manual_seed(0)
    with pytest.raises(RuntimeError, match=message):
        step(ReversibleSequence(PLACES[place](kind)).double(), IMAGES)
    network = ReversibleSequence(PLACES[place](kind)).double()
    with torch.no_grad():
        network(IMAGES)
    plain = nn.Sequential(*copy.deepcopy(network.blocks))
    for x in (IMAGES, 2 * IMAGES):
        assert_same(step(network, x), step(plain, x))


@pytest.mark.parametrize(
    "kind, place, message",
    [
        (lambda: Moving(parameter=True), "F", "writes Moving.mean, .* keep averages in buffers"),
        (lambda: Moving("data", parameter=True), "F", "writes Moving.mean, .* keep averages in buffers"),
        (Standardised, "between couplings", "Standardised .*changes its buffers .* give keep_input=True"),
    ],
)
def test_what_a_repetition_cannot_do_again_is_refused_in_every_step(kind, place, message):
    checks._enabled.set(False)  # they would say less
    network = ReversibleSequence(PLACES[place](kind)).double()
    with torch.no_grad():
        network(IMAGES)
    for x in (IMAGES, 2 * IMAGES):
        with pytest.raises(RuntimeError, match=message):
            step(network, x)
