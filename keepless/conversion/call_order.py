"""The order in which modules are called, as far as the module tree of a network determines it."""

from collections.abc import Iterator
from typing import NamedTuple

from torch import nn

from .activated import hands_over


class Place(NamedTuple):
    """Where a module is registered."""

    parent: nn.Module
    name: str

    @property
    def module(self) -> nn.Module:
        module = self.parent._modules[self.name]
        assert module is not None, self
        return module


class CallOrder:
    """The modules of a network, where they are registered, and in what order Sequentials call them."""

    def __init__(self, root: nn.Module):
        self.names = {module: name for name, module in root.named_modules()}
        self.places: dict[nn.Module, list[Place]] = {module: [] for module in self.names}
        for parent in self.names:
            for name, child in parent._modules.items():
                if child is not None:
                    self.places[child].append(Place(parent, name))
        self.following: dict[Place, list[Place]] = {}  # in Sequentials: the places called after each place
        for module in self.names:
            if _calls_in_order(module) and not self._is_part_of_a_chain(module):
                chain = list(self._chain(module))
                self.following |= {place: chain[index + 1 :] for index, place in enumerate(chain)}

    def _chain(self, sequential: nn.Module) -> Iterator[Place]:
        for name, child in sequential._modules.items():
            if child is not None and self._is_part_of_a_chain(child):
                yield from self._chain(child)
            elif child is not None:
                yield Place(sequential, name)

    def _is_part_of_a_chain(self, module: nn.Module) -> bool:
        """Whether a module is a Sequential inside another, with no other caller and no hooks that see its output."""
        places = self.places[module]
        return (
            _calls_in_order(module)
            and not is_customised(module)
            and len(places) == 1
            and _calls_in_order(places[0].parent)
        )


def _calls_in_order(module: nn.Module) -> bool:
    """Whether a module is a Sequential with the original forward pass."""
    return (
        isinstance(module, nn.Sequential)
        and type(module).forward is nn.Sequential.forward
        and "forward" not in vars(module)
    )


def is_customised(module: nn.Module) -> bool:
    """Whether a module has hooks other than `hand_over`, or its own forward as an instance attribute."""
    hooks = {key: value for key, value in vars(module).items() if key.endswith("_hooks") and value}
    if hands_over(module) and len(module._forward_hooks) == 1:
        del hooks["_forward_hooks"]
    return "forward" in vars(module) or bool(hooks)
