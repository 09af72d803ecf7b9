"""Learn advice: note what a call about which nothing is known has done, and decide once the pass has ended."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ...saved import Kept, TensorSpec, view
from ...torch_internals import node_of
from ..held.calls import Call
from ..held.signs import Signs
from ..held.values import Recipe, Saved, Value
from ..table.rules import attention
from . import advice as bits
from .finder import DERIVING, checkpointed_output, packs_of
from .plan import Flag
from .registry import is_parameter


class _Pack(NamedTuple):
    """A saved tensor."""

    reference: Any  # to the `Saved` that autograd holds, until its part of the graph is freed; or None
    is_result: bool
    is_known: bool  # it, or its base, had a value already
    derived: int  # the bits of the argument of which it is a copy, made inside the call; 0: it is none
    is_shape: bool  # only its shape is kept
    is_flat: bool  # it has no gradient
    is_dropped: bool  # a recipe or a sign mask is kept in its place


class Note:
    """What a call of an unknown site has done that ran with our hooks.

    It holds neither tensors nor values, as the pass goes on.
    """

    def __init__(self, call: Call, result: Any, find: Callable[[Tensor], Value | None]) -> None:
        is_plain = isinstance(result, Tensor) and not result.is_nested
        node = node_of(result) if isinstance(result, Tensor) else None
        value = find(result) if is_plain else None
        base_value = find(result._base) if is_plain and result._base is not None else None
        # Without advice, a recipe would not read the result itself, but what it is computed from, or a copy.
        self.is_special = is_plain and (result._base is not None or node is None or type(node) in DERIVING)
        self.site = call.site
        self.planned = call.planned
        self.value = _reference(value)
        self.base_value = _reference(base_value)
        self.is_empty = not (call.packed or call.recipes or value is not None)
        self.packs = [
            _Pack(
                weakref.ref(saved) if isinstance(saved, Saved) else None,
                tensor is result,
                is_known,
                bits.derived_from(call.arguments, call.copied.get(id(tensor), call.copied.get(id(tensor._base)))),
                type(saved) is TensorSpec,
                not tensor.requires_grad,
                isinstance(saved, Saved) and not _is_kept_view(saved.value),
            )
            for tensor, saved, is_known in call.packed
        ]
        self.recipes: list[tuple[list[int], bool]] = []  # how many values are wanted of it, and is it of its inside
        for recipe, _ in call.recipes:
            recipe.noted_count = wanted_count = [recipe.wanted_count]
            self.recipes.append((wanted_count, len(recipe.outputs) > 0))
        self.needs_rules = call.row.again is attention or any([again.draws for _, again in call.recipes])
        self.hides_parameters = _hides_parameters(call, node)

    def set_advice(self) -> None:
        """Set the site's advice, once the pass has ended."""
        value = self.value()
        base = self.base_value()
        are_inside = [is_inside for wanted_count, is_inside in self.recipes if any(wanted_count)]
        advice = bits.DROP if are_inside else 0
        if are_inside and (value is None or self.needs_rules or any(are_inside)):  # none: the rules drop it in time
            advice |= bits.RULES
        if base is not None and base is not value and isinstance(base.source, Recipe) and base.consumer_count:
            advice |= bits.RULES
        for pack in self.packs:
            advice |= _bits_of(pack, value)
        if self.is_special and value is not None and type(value.source) is Kept and value.may_be_read():
            advice |= bits.KEEP
        if are_inside and self.planned is not None:
            is_masked = self.site.row.mask is not None  # then what it saves inside, the mask, has a recipe of its own
            if not self.planned & Flag.AGAIN or (is_masked and all(are_inside)):
                advice &= ~bits.DROP
            if self.planned & Flag.MASK and is_masked and any(are_inside):
                advice |= bits.MASK
        self.site.advice |= advice | bits.HOOKS if advice and self.hides_parameters else advice


def _hides_parameters(call: Call, node: Any) -> bool:
    """Whether the node of its result does not say that the call has saved a parameter."""
    tensors = [tensor for tensor, _, _ in call.packed]
    parameters = [tensor for tensor in tensors if tensor.requires_grad and (tensor.is_leaf or is_parameter(tensor))]
    packs = packs_of(node) if parameters else ()
    return not all([any([parameter is pack for pack in packs]) for parameter in parameters])


def _reference(value: Any) -> Any:
    return (lambda: None) if value is None else weakref.ref(value)


def _bits_of(pack: _Pack, result_value: Value | None) -> int:
    """What is worth doing for a saved tensor. `result_value`: that of the call's result."""
    saved = None if pack.reference is None else pack.reference()
    if saved is None:
        return bits.RULES if pack.is_shape or pack.is_dropped else 0
    value = saved.value
    source = value.source
    if value is result_value and not pack.is_result:  # the result serves in its place
        return bits.RULES | pack.derived
    if pack.derived and (not _is_kept_view(value) or base_of(value).may_be_read()):
        return bits.HOOKS | pack.derived
    if isinstance(source, Signs):
        return bits.HOOKS | bits.SIGNS
    if _is_kept_view(value):  # recipes read it uncopied, because autograd holds it
        return bits.HOOKS if pack.is_flat and base_of(value).may_be_read() else 0
    return (
        bits.HOOKS if value is result_value or pack.is_known or source.function is checkpointed_output else bits.RULES
    )


def base_of(value: Value) -> Value:
    """The value itself, or the one of which it is a view."""
    source = value.source
    return source.inputs[0] if isinstance(source, Recipe) and source.function is view else value


def _is_kept_view(value: Value) -> bool:
    """Whether a value is kept, or a view of one that is."""
    return not isinstance(base_of(value).source, (Recipe, Signs))


def saves_dropped_outside_calls(references: Sequence[Any]) -> bool:
    """Whether a tensor that was saved outside of calls, by an autograd function of the program, needs our hooks.

    It does if it is dropped, or if a recipe may read it. `references`: weak ones, to the `Saved`s that autograd holds.
    """
    saves = [saved for saved in [reference() for reference in references] if saved is not None]
    return any([not _is_kept_view(saved.value) or base_of(saved.value).may_be_read() for saved in saves])
