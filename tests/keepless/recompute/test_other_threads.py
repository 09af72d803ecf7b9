"""A rehearsal changes nothing that other threads of the program use."""

import itertools
import logging
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from queue import SimpleQueue
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import parametrizations, parametrize

from keepless import recompute_activations
from tests.keepless.recompute.ahead import After, plans_of


class Elsewhere(nn.Module):
    """Asks another thread what it sees, in the middle of a rehearsal and of a pass."""

    def __init__(self, ask: Callable[[], object]):
        super().__init__()
        self.ask = ask

    def __deepcopy__(self, memo: dict[int, Any]) -> "Elsewhere":
        return self

    def forward(self, x: Tensor) -> Tensor:
        thread = threading.Thread(target=self.ask)
        thread.start()
        thread.join()
        return x


def test_another_thread_has_its_hooks_cached_weights_and_logs():
    seen: SimpleQueue[Any] = SimpleQueue()  # of which a rehearsal takes nothing back
    other, normed = nn.Linear(4, 4), parametrizations.weight_norm(nn.Linear(4, 4))
    log = logging.getLogger(FakeTensorMode.__module__)

    def ask() -> None:
        other(torch.ones(1, 4))
        weight = normed.weight
        is_cached = weight is normed.weight and weight is cached
        seen.put((is_cached, log.isEnabledFor(logging.ERROR), called.count(other)))

    called: list[nn.Module] = []
    hook = nn.modules.module.register_module_forward_hook(lambda module, _, __: called.append(module))
    removed = nn.modules.module.register_module_forward_hook(lambda module, _, __: None)
    network = nn.Sequential(nn.Linear(4, 4), nn.GELU(), Elsewhere(ask), Elsewhere(removed.remove), nn.Linear(4, 4))
    recompute_activations(network, budget=0.9)
    try:
        with parametrize.cached():
            cached = normed.weight
            network(torch.randn(8, 4)).sum().backward()
    finally:
        hook.remove()
    assert [seen.get(), seen.get()] == [(True, True, 1)] * 2  # in the rehearsal, which takes the hook's entry back
    assert called.count(network) == [type(one) for one in called].count(nn.GELU) == 1  # no copies
    assert not nn.modules.module._global_forward_hooks and type(parametrize._cache) is dict and not log.filters


def turns() -> Iterator[Callable[[Tensor], Tensor]]:
    return itertools.cycle([torch.tanh, F.silu, F.gelu])


GLOBAL = turns()


def by_default(h: Tensor, given: Iterator[Any] = GLOBAL) -> Tensor:
    return next(given)(h)


def by_global(h: Tensor) -> Tensor:
    return next(GLOBAL)(h)


def by_closure(given: Any) -> Callable[[Tensor], Tensor]:
    return lambda h: (given() if callable(given) else next(given[0]))(h)


FUNCTIONS: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
    "closure": lambda: by_closure([turns()]),
    "generator": lambda: by_closure([one for one in [(one for one in itertools.repeat(torch.tanh))]]),
    "mapped": lambda: by_closure([map(lambda one: one, turns())]),
    "method": lambda: by_closure(turns().__next__),
    "partial": lambda: by_closure(partial(next, turns())),
    "default": lambda: by_default,
    "global": lambda: by_global,
}


@pytest.mark.table
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_rehearsal_takes_no_items_of_iterators(name):
    """Those in collections may be copied. There are three functions, so all networks begin with the same one."""
    layers, x = (nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(2, 8)
    plain, within = (nn.Sequential(After(layers[0], FUNCTIONS[name]()), layers[1]) for _ in range(2))
    recompute_activations(within, budget=0.5)
    expected = [plain(x) for _ in range(3)]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert all(torch.equal(within(x), one) for one in expected)
    refused = [str(one.message) for one in said if "takes items of a" in str(one.message)]
    assert len(refused) == (name not in ("closure", "mapped", "partial"))


class NamedAlike(nn.Module):
    """Its layer has the name of a global iterator, which its code does not read."""

    def __init__(self):
        super().__init__()
        self.GLOBAL = nn.Linear(8, 8)

    def forward(self, x):
        return self.GLOBAL(x).tanh()


def test_an_attribute_may_be_named_like_a_global_iterator():
    """The plan was refused, because the network's code seemed to take the iterator's items."""
    within = recompute_activations(nn.Sequential(NamedAlike(), NamedAlike(), nn.Linear(8, 8)), budget=0.9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        within(torch.randn(64, 8)).sum().backward()
    assert plans_of(within).known
