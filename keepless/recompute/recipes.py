"""Recipes for the results of calls: how to repeat a call from what is kept, or may be kept for it."""

from functools import partial

from torch import Tensor, nn

from ..inputs import tensors_in
from ..saved import Kept, copied, is_ordinary
from ..torch_internals import address
from .calls import Call
from .known_values import KnownValues
from .rules import NotFollowed, Rule
from .values import Again, Recipe, Value, unread_bytes

_MUCH = 16  # tensors this many times smaller than the result may be kept for it
_LONGEST = 12  # recipes between a value and kept ones, by rules; every longer chain keeps one value more


def how_to_repeat(known: KnownValues, rule: Rule, call: Call, result: Tensor) -> Again | None:
    """How to repeat a call, if its inputs are kept or may be kept for it (rules 4 and 5).

    By a plan, recipes may read any tensor that the forward pass has made, instead of rule 5.
    """
    alone = 0  # bytes kept for the recipe alone
    room = call.room(result)
    unread: list[Value] = []

    def find(tensor: Tensor, lend: bool = False) -> Value | Kept:
        nonlocal alone
        copy_it = known.copy_parameters and isinstance(tensor, nn.Parameter)
        if not copy_it:
            for parameter, kept in call.parameters:
                if parameter is tensor:
                    return kept
            if type(tensor) is nn.Parameter and tensor.requires_grad and known.outer is None:
                # As below, in a tenth of the calls: it has no value, and stays where it is.
                is_small = _MUCH * _bytes(tensor) <= room
                return _copy(known, tensor) if is_small else Kept(tensor, None)
        value = None if tensor is result else known.find(tensor)
        if value is None or not (value.readers or isinstance(value.source, Recipe)):
            value = _available(known, tensor, call, result)
        if value is not None and not copy_it:
            if value.readers == value.sign_readers:
                unread.append(value)
            return value
        stays = tensor.requires_grad and tensor.is_leaf
        is_small = _MUCH * _bytes(tensor) <= room
        if tensor is result or not (is_small or ((lend or stays) and not copy_it)):
            raise NotFollowed
        lent, size = _lent(known, tensor, is_small)
        alone += 0 if stays else size
        return lent

    try:
        again = rule(find, call.args, call.kwargs, result)
    except NotFollowed:
        return None
    if again.draws:
        if call.random is None or _MUCH * call.random.state.nbytes > room:
            return None
        again = again._replace(function=partial(call.random.call, again.function))
    if unread and not known.by_plan:
        alone += unread_bytes(unread)
    return again if alone <= room else None


def _available(known: KnownValues, tensor: Tensor, call: Call, result: Tensor) -> Value | None:
    """The value of an argument, if a recipe may read it."""
    if tensor is result:
        value = _value_before(known, call, result)
    elif is_ordinary(tensor):
        value = known.value_of(tensor)
    else:
        raise NotFollowed
    if not known.by_plan:
        return None if value is not None and value.unread else value
    if value is None and tensor is not result:
        is_large = _MUCH * _bytes(tensor) > call.room(result)  # a mask, say, which one copy per call would exceed
        if known.is_made(tensor) or (is_large and known.has_made(tensor)):
            value = known.keep(tensor)
    if value is not None and value.unread:
        known.note_need(value, tensor)
    return value


def _value_before(known: KnownValues, call: Call, overwritten: Tensor) -> Value | None:
    """The value that a tensor had before a call overwrote it, unless it can only be read from the same memory."""
    value = call.before or known.find(overwritten, overwrites=1)  # from a copy
    if value is None:
        return None
    if known.trace is not None:
        return value if known.trace.overwrites(value, overwritten) else None
    return None if value.reads_storage(address(overwritten.untyped_storage())) else value


def _lent(known: KnownValues, tensor: Tensor, is_small: bool) -> tuple[Value | Kept, int]:
    """Keep an argument for a recipe; return it and its bytes. A copy, if the original is small or may change unseen."""
    size = _bytes(tensor)
    if tensor.requires_grad:
        is_copied = is_small and tensor.is_leaf
    else:
        is_copied = is_small or not known.has_made(tensor)
    if is_copied:
        value = _copy(known, tensor)
        return value, value.bytes
    lent = known.lend(tensor)
    if isinstance(lent, Value) and lent.unread:
        known.note_need(lent, tensor)
    return lent, size


def _copy(known: KnownValues, tensor: Tensor) -> Value:
    copy = copied(tensor)
    value = Value(Kept(copy, known.outer), bytes=min(_bytes(tensor), tensor.nbytes))
    if known.trace is not None:
        known.trace.keeps(value, copy)
    return value


def follow(known: KnownValues, again: Again, call: Call, result: Tensor) -> Value | None:
    """Give the result of a call a recipe, and return its value; None if the chain of recipes would be too long."""
    recipe = Recipe(again, result)
    if recipe.depth > _LONGEST and not known.by_plan:  # recipes are computed without recursion
        return None
    own = known.find(result)
    if own is None:
        own = known.remember(result, Value(recipe))
    else:  # the call has saved its own result
        own.become(recipe)
    for saved in call.replaceable:
        saved.read_instead(own)
    if result._base is not None:
        _follow_base(known, call, result, result._base, own)
    return own


def _follow_base(known: KnownValues, call: Call, result: Tensor, base: Tensor, own: Value) -> None:
    """Functions such as `F.instance_norm` return a view of all that they make: other views follow from it."""
    if base.numel() != result.numel() or base.dtype != result.dtype or not known.is_made(base):
        return
    if not (base.is_contiguous() and result.is_contiguous()):
        return
    is_new = not own.reads_storage(address(base.untyped_storage())) if call.overwrites else call.has_made(base)
    if not is_new:  # but a view of an argument
        return
    recipe, value = Recipe(Again(Tensor.view, (own, base.shape)), base), known.find(base)
    if value is None:
        known.remember(base, Value(recipe))
    elif isinstance(value.source, Kept):
        value.become(recipe)


def leave_own_inside(call: Call, result: Tensor) -> None:
    """Reduce `call.inside` to what the call has made itself, other than its result, and what is not tiny beside it."""
    given = {address(one.untyped_storage()) for one in (*tensors_in(call.arguments), result) if is_ordinary(one)}
    call.inside = tuple(
        part for part in call.inside if part.value.storage not in given and _MUCH * part.value.bytes > result.nbytes
    )


def _bytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()
