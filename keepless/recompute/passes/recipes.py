"""Decide for each result of a call: a recipe that repeats the call from kept values, or a kept tensor."""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ...inputs import tensors_in
from ...saved import Kept, is_ordinary, laid_out
from ...torch_internals import FakeTensor, address, awaits_capture, is_capturing
from ..held.calls import Call
from ..held.values import Again, Recipe, Value, kept_bytes_below
from ..table.functions import Row
from ..table.rules import NotRepeated, Rule
from .finder import MUCH, Finder
from .plan import ByPlan, Flag
from .registry import Registry

# The longest chains of recipes without and with a plan, as recursion computes them; then a result is kept.
LONGEST = 12
LONGEST_PLANNED = 200
STATE_BYTES = torch.default_generator.get_state().nbytes  # of the CPU's generators
CUDA_STATE_BYTES = 16
DEEPEST = 250  # recipes in a chain, which call each other: views and casts may lengthen it


def may_drop(registry: Registry, row: Row, arguments: Sequence[Any], result: Tensor) -> bool:
    """Whether a call's result may be recomputed. One without a gradient only by a plan, if a layer is frozen."""
    if result.grad_fn is not None:
        return True
    if not (registry.by_plan and row.is_slow and torch.is_grad_enabled()) or result.is_inference():
        return False
    tensors = tensors_in(arguments)
    reads_parameter = any([isinstance(tensor, nn.Parameter) for tensor in tensors])
    return reads_parameter and not any([tensor.requires_grad for tensor in tensors])


def prepare_to_repeat(registry: Registry, rule: Rule, call: Call, result: Tensor) -> Again | None:
    """Keep what a call reads, if it is worth repeating (rules 4 and 5), and return how. None: `call.why` says why not.

    With a plan, recipes may read any tensor that the forward pass has made, and rule 5 does not apply. Nor does it
    where an earlier pass has found that the recipe is worth while.
    """
    try:
        room = None if call.is_advised else call.freeable_bytes(result)
        saved_leaves = [tensor for tensor, kept, _ in call.packed if isinstance(kept, Kept)]
        find = Finder(registry, result, room, saved_leaves, call.before)
        again = rule(find, call.args, call.kwargs, result)
        if room is not None:
            _refuse_if_too_much_is_kept(find, again, room)
        return _with_state(again, call, result) if again.draws else again
    except NotRepeated as reason:
        call.why = str(reason)
        return None


def _refuse_if_too_much_is_kept(find: Finder, again: Again, room: int) -> None:
    """NotRepeated if a recipe would keep more than the bytes that it frees (`room`), or read far more than those."""
    kept_bytes = find.kept_bytes
    if not find.registry.by_plan:
        kept_bytes += kept_bytes_below(find.values, only_unread=True)
        inputs = [argument for argument in again.arguments if isinstance(argument, Value)]
        if kept_bytes_below(inputs) > MUCH * room:
            raise NotRepeated(f"over {MUCH} times smaller than what it is computed from")  # e.g. a mean
    if kept_bytes > room:
        raise NotRepeated("smaller than what would be kept for it")


def _with_state(again: Again, call: Call, result: Tensor) -> Again:
    """The repeated call, with the random state before the call. NotRepeated: none is known, or it is too large."""
    state_bytes = CUDA_STATE_BYTES if result.is_cuda else STATE_BYTES  # a fake tensor has no generator of its own
    if call.random is None or (not call.is_advised and MUCH * state_bytes > call.freeable_bytes(result)):
        raise NotRepeated("its random numbers are not worth keeping")
    return again._replace(function=partial(_draw_again, *call.random, again.function))


def give_recipe(registry: Registry, again: Again, call: Call, result: Tensor, longest: int = LONGEST) -> Value | None:
    """Give the result of a call, and what it has saved inside, a recipe, and return the result's value.

    None if the chain of recipes would be too long. With a plan, such calls always run again with gradients, as in the
    forward pass: attention chooses its backend by that too.
    """
    recipe = Recipe(again, result)
    if recipe.depth > longest:
        call.why = f"{longest} recipes in a row"
        return None
    repeats_inside = call.row.mask is None and (call.row.inside if registry.by_plan else bool(call.inside))
    if repeats_inside:
        recipe = give_recipe_inside(again, call, result)
    else:
        call.recipes.append((recipe, again))
    value = registry.find_value(result)
    if value is None:
        value = registry.remember(result, Value(recipe))
    else:  # the call has saved its own result
        value.become(recipe)
    if repeats_inside:
        recipe.outputs = [*recipe.outputs, weakref.ref(value)]
    for saved in call.replaceable:
        saved.read_instead(value)
    if result._base is not None:
        _give_base_recipe(registry, call, result, result._base, value)
    return value


def _give_base_recipe(registry: Registry, call: Call, result: Tensor, base: Tensor, value: Value) -> None:
    """Give the base of a result a recipe: `F.instance_norm`, for example, returns a view of all that it makes.

    `value`: the result's.
    """
    if base.numel() != result.numel() or base.dtype != result.dtype or not registry.storages.is_made(base):
        return
    if not (base.is_contiguous() and result.is_contiguous()):
        return
    is_new = not value.reads_storage(address(base.untyped_storage())) if call.overwrites else call.has_made(base)
    if not is_new:  # a view of an argument
        return
    recipe = Recipe(Again(Tensor.view, (value, base.shape)), base)
    base_value = registry.find_value(base)
    if base_value is None:
        registry.remember(base, Value(recipe))
    elif isinstance(base_value.source, Kept):
        base_value.become(recipe)


def drop_foreign_parts(registry: Registry, call: Call, result: Tensor) -> None:
    """Leave in `call.inside` only tensors that the call itself has made, but not its result or much smaller tensors."""
    places = {registry.place(tensor) for tensor in (*tensors_in(call.arguments), result) if is_ordinary(tensor)}
    call.inside = [
        part for part in call.inside if part.value.storage not in places and MUCH * part.value.bytes > result.nbytes
    ]


def give_recipe_inside(again: Again, call: Call, result: Tensor | None) -> Recipe:
    """Give what a call has saved inside a recipe, and return it. It computes `result` too, if given."""
    originals = [part.value.get() for part in call.inside] + ([] if result is None else [result])
    needs_grad = [isinstance(a, Tensor) and a.requires_grad for a in call.arguments][: len(again.arguments)]
    saves = {part.number: part.is_base for part in call.inside}
    forms = [(original.shape, original.dtype, original.stride()) for original in originals]
    function: Any = partial(_run_again, again.function, needs_grad, saves, forms)
    recipe = Recipe(again._replace(function=function, can_overwrite=False), originals[0])
    recipe.outputs = [weakref.ref(part.value) for part in call.inside]
    for part in call.inside:
        part.value.become(recipe)
    call.recipes.append((recipe, again))
    return recipe


def decide_by_plan(registry: Registry, policy: ByPlan, rule: Rule, call: Call, result: Tensor) -> None:
    """Decide by a plan whether the result of a call, and what it has saved inside, get recipes."""
    flag = policy.take_flag(call.function, result.nbytes)
    call.planned = Flag.AGAIN | Flag.MASK if flag is None else flag  # if no plan matches this call
    longest = LONGEST if flag is None else LONGEST_PLANNED
    value = give_planned_recipes(registry, call.planned, rule, call, result, longest) or registry.find_value(result)
    if value is None:
        if result.grad_fn is None:
            return  # kept only once a recipe reads it: nothing else says when it is freed
        value = registry.keep(result)
    value.number = policy.call_number
    read_result_instead(registry, call, result, value, serves=policy.plan is None or not policy.plan.fits)


def give_planned_recipes(
    registry: Registry, planned: int, rule: Rule, call: Call, result: Tensor, longest: int
) -> Value | None:
    """Give a result and what its call has saved inside recipes, if that is planned. Returns the result's value."""
    row = call.row
    again = prepare_to_repeat(registry, rule, call, result) if planned & Flag.AGAIN else None
    if row.mask is not None and call.inside and planned & Flag.MASK:
        mask = prepare_to_repeat(registry, row.mask, call, result)
        if mask is not None:
            give_recipe_inside(mask, call, None)
    return None if again is None else give_recipe(registry, again, call, result, longest)


def read_result_instead(registry: Registry, call: Call, result: Tensor, value: Value, serves: bool = True) -> None:
    """Let a kept result be read in place of its base, and if it `serves`, of saved arguments. `value`: the result's.

    The program may overwrite the result, which PyTorch alone does not read: then it is copied, as for a recipe.
    """
    if serves:
        for saved in call.replaceable:
            saved.read_instead(value)
            value.readers += (weakref.ref(saved),)
    base = result._base
    if base is not None and base.numel() == result.numel() and call.has_made(base):
        base_value = registry.find_value(base) or registry.keep(base)  # other views of it are recomputed from this
        base_value.number = value.number


def _run_again(
    function: Callable[..., Any], needs_grad: Sequence[bool], saves: dict[int, bool], forms: list[Any], *arguments: Any
) -> list[Tensor]:
    """Run a function with gradients, as in the forward pass; return what it saves inside, and its result if wanted.

    `saves`: the numbers of these among all that it saves, and whether they are views of what is wanted. `forms`: the
    shape, dtype and strides of each tensor to return.
    """
    parts: list[Tensor] = []
    number = -1

    def pack(tensor: Tensor) -> None:
        nonlocal number
        number += 1
        if number in saves:
            base = tensor._base if saves[number] else None
            parts.append((tensor if base is None else base).detach())

    leaves = [
        argument.detach().requires_grad_(needs) if isinstance(argument, Tensor) else argument
        for argument, needs in zip(arguments, needs_grad, strict=True)
    ]
    with torch.enable_grad(), saved_tensors_hooks(pack, lambda packed: packed):  # nothing is unpacked
        result = function(*leaves)
    tensors = [*parts, result.detach()][: len(forms)]  # the result, which comes last, may have no form: not wanted
    if [(tensor.shape, tensor.dtype) for tensor in tensors] != [form[:2] for form in forms]:
        raise RuntimeError(
            f"{function} has run again for the backward pass, and has saved other tensors than in the forward "
            f"pass: with a budget, a function must do the same each time it runs"
        )
    return [laid_out(tensor, stride) for tensor, (*_, stride) in zip(tensors, forms, strict=True)]


def note_random(call: Call) -> None:
    """Note the state of the generator, if a call will draw from it."""
    draws = call.row.draws
    inputs = tensors_in(call.arguments) if draws is not None and draws(call.args, call.kwargs) else ()
    if inputs:
        call.random = random_state(inputs[0])


def _draw_again(generator: torch.Generator, state: Tensor, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function with the random numbers that follow from a state. The generator's present state is restored."""
    present = generator.get_state()
    generator.set_state(state)
    try:
        return function(*arguments)
    finally:
        generator.set_state(present)


def random_state(like: Tensor) -> tuple[torch.Generator, Tensor] | None:
    """The generator of a tensor's device, and its state (CPU: 5 KB, CUDA: 16 bytes); None if it is unknown.

    Also None while a CUDA graph is captured, or before it: the graph's backward pass would draw other numbers.
    """
    if is_capturing() or awaits_capture.get():
        return None
    generator = torch.default_generator if like.is_cpu or isinstance(like, FakeTensor) else None
    if generator is None and like.is_cuda:
        generator = torch.cuda.default_generators[like.device.index]
    return None if generator is None else (generator, generator.get_state())
