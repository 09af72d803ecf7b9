"""The gradients of a network: which parameters get some, and whether they come during the next step."""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...inputs import tensors_in
from ...torch_internals import post_accumulate_hooks
from ..step.sharded import may_have_buckets
from ..step.stand_ins import OPTIMIZERS


class Backward:
    """Notes whether the backward pass of an output has begun. It exists as long as the graph.

    A pass that makes a graph itself, as for a penalty on gradients, keeps the network's: another one follows.
    """

    def __init__(self, output: object) -> None:
        self.has_begun = False
        for node in [tensor.grad_fn for tensor in tensors_in(output) if tensor.grad_fn is not None]:
            node.register_prehook(self)

    def __call__(self, gradients: Sequence[Tensor | None]) -> None:
        self.has_begun = self.has_begun or not torch.is_grad_enabled()


class Gradients:
    """Follows the gradients of a network from pass to pass."""

    def __init__(self) -> None:
        self.parameters: list[Any] = []  # weak references to their modules, and names
        self._awaited: weakref.ref[Backward] | None = None  # of the last pass before which no gradient was there
        self._has_overlap = False  # several forward passes come before a backward pass

    def trained_flags(self, module: nn.Module) -> tuple[bool, ...]:
        """For each parameter, whether it needs a gradient.

        The parameters are noted, and the module is searched again only once one of them is removed. There is no weak
        reference to a parameter: `torch.utils.swap_tensors` refuses tensors that have one.
        """
        if self.parameters:
            try:
                return tuple([owner()._parameters[name].requires_grad for owner, name in self.parameters])
            except (AttributeError, KeyError):  # of None: a module was freed, or has lost a parameter
                pass
        parameters = [
            (owner, name, parameter)
            for owner in module.modules()
            for name, parameter in owner._parameters.items()
            if parameter is not None
        ]
        self.parameters = [(weakref.ref(owner), name) for owner, name, _ in parameters]
        return tuple([parameter.requires_grad for _, _, parameter in parameters])  # a tied one comes several times

    def await_backward(self, backward: Backward) -> None:
        """A pass before which no gradient was there has ended; its backward pass is to come."""
        self._awaited = weakref.ref(backward)

    def note_overlap(self) -> None:
        """The next pass begins: note whether an earlier one still awaits its backward pass."""
        awaited = None if self._awaited is None else self._awaited()
        self._has_overlap = self._has_overlap or (awaited is not None and not awaited.has_begun)

    def are_coming(self) -> bool:
        """Whether each gradient of the next pass takes new memory, and stays there, as far as a parameter shows it.

        Not if it is there already, if DDP has memory for it, if an optimiser or post-accumulate hook may take it away,
        or if an earlier pass has awaited its backward pass as another one began: then the gradients of both come once.
        """
        if self._has_overlap or may_have_buckets():
            return False
        for owner, name in self.parameters:
            parameter = owner()._parameters[name]
            if parameter.requires_grad:
                is_taken = not parameter.is_leaf or post_accumulate_hooks(parameter) or OPTIMIZERS in parameter.__dict__
                if is_taken or parameter.grad is not None:
                    return False
        return True
