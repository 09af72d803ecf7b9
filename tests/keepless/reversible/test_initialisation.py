"""Modules that initialise themselves with the first minibatch train as without reversibility."""

import copy
from itertools import product

import pytest
import torch
from torch import nn

from keepless import AdditiveCoupling, AffineAdapterNaive, AffineCoupling, InvertibleModuleWrapper, ReversibleSequence
from tests.keepless.reversible.test_modules import IMAGES, assert_same, step


class ActNorm(nn.Module):
    """(x + shift) * scale, of zero mean and unit variance in the first minibatch."""

    def __init__(self, values="parameters", flag="buffer", write="copy"):
        super().__init__()
        self.write = write
        for name, start in (("shift", torch.zeros(1)), ("scale", torch.ones(1))):
            if values == "parameters":
                self.register_parameter(name, nn.Parameter(start))
            else:
                self.register_buffer(name, start)
        self.flag = flag
        if flag == "attribute":
            self.ready = False
        else:
            self.register_buffer("ready", torch.zeros((), dtype=getattr(torch, flag)))

    def set(self, name, value):
        if self.write == "copy":
            getattr(self, name).copy_(value)
        elif self.write == "data":
            getattr(self, name).data.copy_(value)
        elif self.write == "data replaced":
            getattr(self, name).data = value
        else:
            setattr(self, name, nn.Parameter(value) if isinstance(getattr(self, name), nn.Parameter) else value)

    def initialise(self, x):
        with torch.no_grad():
            self.set("shift", -x.mean().reshape(1))
            self.set("scale", 1 / x.std().reshape(1))
            self.ready = True if self.flag == "attribute" else torch.ones_like(self.ready)

    def forward(self, x):
        if not self.ready:
            self.initialise(x)
        return (x + self.shift) * self.scale

    def inverse(self, y):
        assert self.ready
        return y / self.scale - self.shift


class Standardised(nn.Module):
    """As RealNVP's batch norm: the inverse reads what the last forward pass has left in the buffers."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("std", torch.ones(()))

    def forward(self, x):
        self.mean, self.std = x.detach().mean(), x.detach().std()
        return (x - x.mean()) / x.std()

    def inverse(self, y):
        return y * self.std + self.mean


class Rescaled(nn.Module):
    """Each forward pass writes over the weights, as for a weight norm."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[0.3, -2.0], [1.0, 0.5]]))

    def forward(self, x):
        with torch.no_grad():
            self.weight.div_(self.weight.norm())
        return x * self.weight.sum() + self.weight[0, 1]

    def inverse(self, y):
        return (y - self.weight[0, 1]) / self.weight.sum()


class Around(nn.Module):
    """The flag is here, and what it stands for inside."""

    def __init__(self, norm, flag):
        super().__init__()
        self.norm, self.flag = norm, flag
        norm.ready = True if norm.flag == "attribute" else torch.ones_like(norm.ready)
        if flag == "attribute":
            self.done = False
        else:
            self.register_buffer("done", torch.zeros((), dtype=getattr(torch, flag)))

    def forward(self, x):
        if not self.done:
            self.norm.initialise(x)
            self.done = True if self.flag == "attribute" else torch.ones_like(self.done)
        return self.norm(x)

    def inverse(self, y):
        return self.norm.inverse(y)


KINDS = {
    "bool flag": lambda: ActNorm(flag="bool"),
    "byte flag": lambda: ActNorm(flag="uint8", write="data"),
    "integer flag": lambda: ActNorm(flag="int64"),
    "number flag": lambda: ActNorm(flag="float32", write="data replaced"),
    "new parameters": lambda: ActNorm(flag="float32", write="new"),
    "attribute": lambda: ActNorm(flag="attribute"),
    "attribute, data": lambda: ActNorm(flag="attribute", write="data"),
    "buffers, attribute": lambda: ActNorm("buffers", "attribute"),
    "buffers, bool flag": lambda: ActNorm("buffers", "bool"),
    "attribute around parameters": lambda: Around(ActNorm(flag="attribute"), "attribute"),
    "flag around parameters": lambda: Around(ActNorm(flag="attribute", write="data"), "bool"),
    "attribute around buffers": lambda: Around(ActNorm("buffers", "attribute"), "attribute"),
    "each time": Standardised,
    "parameters each time": Rescaled,
    "flag around buffers": lambda: Around(ActNorm("buffers", "attribute"), "uint8"),
}


def conv(*modules):
    return nn.Sequential(*modules, nn.Conv2d(4, 4, 1), nn.Tanh())


PLACES = {
    "F": lambda kind: [AdditiveCoupling(conv(kind()), conv()), AdditiveCoupling(conv())],
    "G": lambda kind: [AdditiveCoupling(conv()), AdditiveCoupling(conv(), conv(kind()))],
    "F and G": lambda kind: [AffineCoupling(conv(kind()), adapter=AffineAdapterNaive), AdditiveCoupling(conv(kind()))],
    "inside a chain": lambda kind: [
        AdditiveCoupling(ReversibleSequence([AdditiveCoupling(nn.Sequential(kind(), nn.Conv2d(2, 2, 1))), kind()]))
    ],
    "between couplings": lambda kind: [kind(), AdditiveCoupling(conv()), kind(), kind(), AdditiveCoupling(conv())],
}
FORMS = {
    "sequence": ReversibleSequence,
    "wrappers": lambda blocks: nn.Sequential(*map(InvertibleModuleWrapper, blocks)),
    "kept inputs": lambda blocks: nn.Sequential(*(InvertibleModuleWrapper(block, keep_input=True) for block in blocks)),
}


CASES = {*product(KINDS, ["F"], ["sequence"]), *product(KINDS, ["between couplings"], ["wrappers"])}
CASES |= {*product(["bool flag"], PLACES, FORMS)}


@pytest.mark.parametrize("kind, place, form", sorted(CASES))
def test_gradients_and_values_are_those_of_stored_activations(kind, place, form):
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


def test_modules_that_learn_their_sizes_from_the_first_minibatch():
    steps = []
    for disable in (False, True):
        branch = nn.Sequential(
            nn.LazyConv2d(4, 1, bias=False), nn.LazyBatchNorm2d(), nn.Tanh(), nn.LazyConv2d(4, 1)
        ).double()
        steps.append(step(ReversibleSequence([AdditiveCoupling(branch, nn.Tanh())], disable=disable), IMAGES))
    assert_same(*steps)
