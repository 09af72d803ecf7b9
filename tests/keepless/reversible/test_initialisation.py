"""Modules that initialise themselves, or change something else in a forward pass, train as without reversibility."""

import copy
from itertools import product

import pytest
import torch
from torch import nn

from keepless import AdditiveCoupling, AffineAdapterNaive, AffineCoupling, InvertibleModuleWrapper, ReversibleSequence
from keepless.reversible import checks
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
        elif self.write in ("data replaced", "traced"):
            getattr(self, name).data = value.data
        else:
            setattr(self, name, nn.Parameter(value) if isinstance(getattr(self, name), nn.Parameter) else value)

    def initialise(self, x):
        with torch.set_grad_enabled(self.write == "traced"):
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


class Moving(nn.Module):
    """It subtracts a moving average, then moves it: a buffer, or a parameter that each pass replaces or writes over."""

    def __init__(self, changes="nothing", kind="buffer"):
        super().__init__()
        self.changes, self.kind, self.first, self.calls, self.cache = changes, kind, True, 0, None
        self.register_buffer("on", torch.tensor(False))
        if kind == "buffer":
            self.register_buffer("mean", torch.zeros(()))
        else:
            self.mean = nn.Parameter(torch.zeros(()), requires_grad=False)

    def forward(self, x):
        y, mean = x - self.mean.clone(), x.detach().mean()
        new = mean if self.kind == "last" else self.mean.detach().lerp(mean, 0.5)
        if self.kind == "replaced":
            self.mean = nn.Parameter(new, requires_grad=False)
        else:
            (self.mean.data if self.changes == "data" else self.mean).copy_(new)
        if self.changes == "toggle":
            self.on.logical_not_()
            y = y * (1 + self.on)
        elif self.changes == "calls":
            self.calls += 1
            y = y * self.calls
        elif self.changes == "attribute":
            self.first = False
        elif self.changes == "cache":
            y = y if self.cache is None else y + self.cache
            self.cache = x.detach().sin()
        return y

    def inverse(self, y):
        return y + self.mean


class Codebook(nn.Module):
    """As in vector quantisation: the first minibatch fills the codes, and each moves them after it used them."""

    def __init__(self):
        super().__init__()
        self.register_buffer("ready", torch.tensor(False))
        self.register_buffer("codes", torch.zeros(5))

    def forward(self, x):
        values = x.detach().flatten()
        if not self.ready:
            self.codes.copy_(values[:5])
            self.ready.fill_(True)
        nearest = (values[:, None] - self.codes).abs().argmin(1)
        y = x * self.codes[nearest].view_as(x)
        self.codes.index_add_(0, nearest, values / len(values))
        return y


class Gradual(ActNorm):
    """The first three minibatches move the parameters."""

    def forward(self, x):
        if self.ready < 3:
            with torch.no_grad():
                (self.shift.data if self.write == "data" else self.shift).lerp_(-x.mean(), 0.5)
            self.ready += 1
        return (x + self.shift) * self.scale


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
    "traced": lambda: ActNorm(flag="float32", write="traced"),
    "traced, integer flag": lambda: ActNorm(flag="int64", write="traced"),
    "traced, attribute": lambda: ActNorm(flag="attribute", write="traced"),
    "used before it moves": Moving,
    "used before it moves, data": lambda: Moving("data"),
    "used before it moves, attribute": lambda: Moving("attribute"),
    "used before it moves, toggle": lambda: Moving("toggle"),
    "used before it moves, calls": lambda: Moving("calls"),
    "used before it moves, cache": lambda: Moving("cache"),
    "used before it is replaced": lambda: Moving("attribute", "replaced"),
    "codebook": Codebook,
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


NO_INVERSE = {"codebook", *(f"used before it moves, {what}" for what in ("toggle", "calls", "cache"))}
CASES = {*product(KINDS, ["F"], ["sequence"]), *product(KINDS.keys() - NO_INVERSE, ["between couplings"], ["wrappers"])}
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


@pytest.mark.parametrize(
    "kind, message",
    {
        "no_grad": (lambda: Gradual(flag="int64"), "writes Gradual.shift from its earlier values"),
        "data": (lambda: Gradual(flag="int64", write="data"), "writes Gradual.shift from its earlier values"),
        "moving": (lambda: Moving(kind="parameter"), "writes Moving.mean from its earlier values"),
        "last": (lambda: Moving(kind="last"), "writes Moving.mean after it has used the earlier values"),
        "inverse": (lambda: Moving("calls"), "the inverse .* does not restore its input"),
    }.values(),
)
def test_what_a_repetition_cannot_do_again_is_named(kind, message):
    checks._enabled.set(False)  # they would say less
    place = "between couplings" if "inverse" in message else "F"
    network = ReversibleSequence(nn.ModuleList(PLACES[place](kind)).double())
    with pytest.raises(RuntimeError, match=message):
        for x in (IMAGES, 2 * IMAGES):
            step(network, x)
