"""How to repeat results that follow from autograd's nodes: views, copies, and norms with nodes of their own."""

from typing import Any, Protocol

from torch import Tensor

from ..norms.bn_act import BatchNormActivationBackward, is_node, recompute_output
from ..saved import Kept, form_of, view
from ..torch_internals import is_synchronised_norm, packed_by_function
from .calls import Call
from .rules import normalised
from .values import Again, Value, saved_value, unread_bytes

_NODES = frozenset(["BatchNormActivationBackward", "SyncBatchNormBackward"]) | {
    f"{name}Backward0" for name in ("ToCopy", "Clone", "UnsafeView")
}


class Registry(Protocol):
    """The known values of a forward pass."""

    copies_are_worth: int

    def is_made(self, tensor: Tensor) -> bool: ...

    def value_of(self, tensor: Tensor, call: Call | None) -> Value | None: ...

    def lend(self, tensor: Tensor, call: Call | None) -> Value | Kept: ...

    def copied(self, argument: Tensor, copy: Tensor, call: Call) -> Value: ...


def by_node(known: Registry, tensor: Tensor, call: Call | None) -> Again | Value | None:
    """How to recover a tensor from its autograd node, or the value of another tensor that equals it. None: unknown."""
    node: Any = tensor.grad_fn
    name = type(node).__name__
    if not (tensor._is_view() or name in _NODES) or not known.is_made(tensor):
        return None
    if tensor._is_view():
        return _of_view(known, tensor, call)
    packed = packed_by_function(node) if is_node(node) or is_synchronised_norm(node) else ()
    if is_node(node):
        if not node.strategy.recompute_output or tensor._version != node.output_version:
            return None
        return Again(_checkpointed_output, (node, saved_value(packed[0]) if packed else None))
    if tensor._version:
        return None
    if packed:
        return _of_synchronised_norm(known, node, packed, call)
    if call is not None and name in ("ToCopyBackward0", "CloneBackward0"):
        return _of_copied_argument(known, tensor, node, call)
    if call is not None and name == "UnsafeViewBackward0":
        return _of_reshaped_argument(known, tensor, node, call)
    return None


def _checkpointed_output(node: BatchNormActivationBackward, kept: Tensor | None) -> Tensor:
    """The output of a `CheckpointedABN`, which its node also holds while it is read. `kept`: saved by the node.

    The node finds `kept` by itself; as an argument it counts as needed, and is computed before if it is not kept.
    """
    return recompute_output(node)


def _of_view(known: Registry, tensor: Tensor, call: Call | None) -> Again | None:
    base = tensor._base
    if base is None or (form := form_of(tensor, base)) is None or (value := known.value_of(base, call)) is None:
        return None
    return Again(view, (value, *form))


def _of_synchronised_norm(known: Registry, node: Any, packed: tuple[Any, ...], call: Call | None) -> Again | None:
    """The output of `nn.SyncBatchNorm`: its node has everything but the bias, which only a trained one leads to."""
    x, weight, mean, invstd, *_ = map(saved_value, packed)
    if not all(isinstance(saved, (Value, Kept)) for saved in (x, mean, invstd)):
        return None
    bias = None if weight is None else getattr(node.next_functions[2][0], "variable", None)
    if bias is None:
        return None
    return Again(normalised, (x, mean, invstd, weight, known.lend(bias, call)), fresh=True)


def _of_copied_argument(known: Registry, tensor: Tensor, node: Any, call: Call) -> Again | Value | None:
    """A copy of an argument, made inside the running call: by autocast, or by `silu_` before it overwrites it."""
    argument = _argument_copied_by(node, call)
    if argument is None or argument.shape != tensor.shape or argument.device != tensor.device:
        return None
    if argument.dtype == tensor.dtype:
        return known.copied(argument, tensor, call)
    value = smaller_value_of(known, argument, tensor, call)
    return None if value is None else Again(Tensor.to, (value, tensor.dtype))


def _of_reshaped_argument(known: Registry, tensor: Tensor, node: Any, call: Call) -> Again | None:
    """A contiguous, reshaped copy of an argument, made inside the running call, as matrix products do."""
    copy = node.next_functions[0][0]
    argument = _argument_copied_by(copy, call) if type(copy).__name__ == "CloneBackward0" else None
    if argument is None or argument.numel() != tensor.numel() or argument.dtype != tensor.dtype:
        return None
    value = smaller_value_of(known, argument, tensor, call)
    return None if value is None else Again(Tensor.reshape, (value, tensor.shape))


def smaller_value_of(known: Registry, argument: Tensor, copy: Tensor, call: Call) -> Value | None:
    """The value of an argument, unless more would be kept for it alone than its copy takes, or than that is worth."""
    value = known.value_of(argument, call)
    return None if value is None or unread_bytes([value]) > known.copies_are_worth * copy.nbytes else value


def _argument_copied_by(node: Any, call: Call) -> Tensor | None:
    """The argument of the running call that is a node's input, perhaps expanded to the shape that it has."""
    source, number = node.next_functions[0]
    if type(source).__name__ == "ExpandBackward0":
        source, number = source.next_functions[0]
    leaf = getattr(source, "variable", None)
    for argument in call.arguments:
        if isinstance(argument, Tensor):
            if argument is leaf or (argument.grad_fn is source and argument.output_nr == number):
                return argument
    return None
