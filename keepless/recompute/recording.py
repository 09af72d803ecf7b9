"""Record a forward pass so that autograd keeps few of its tensors, and computes the others again.

The rules, which this folder keeps together:

1. What is seen. A `Recording` sees every outermost call of a function, as a function mode (not if `checkpointed_only`),
   and every tensor that autograd saves, by saved-tensor hooks. Most tensors are saved during a call, before it is known
   whether that call can be repeated.
2. What autograd holds. In place of a tensor it gets a `Saved`, which refers to a `Value`. A value is either `Kept`, or
   has a `Recipe`: a function of other values. Two operations that save one tensor share its value. Vectors, parameters
   and tensors without a storage are just `Kept`.
3. Who keeps. A saved tensor without a value is kept (`keep`). If its call then turns out to have a rule (`FOLLOWED` in
   rules.py), and all that the rule needs is at hand, the value becomes a recipe and the tensor is dropped (`follow`).
   Until then it is not given to the hooks around this recording, e.g. `save_on_cpu`, which might copy it for nothing.
   Of an input whose values no gradient needs, because the weights of a convolution or an eval-mode norm are frozen, the
   shape and strides are kept (`Form`). A value that only ReLU and LeakyReLU read shrinks to one bit per entry (`Signs`)
   once its tensor, and those of recipes that read it, are freed, or the recording ends. Until then outer hooks do not
   get it.
4. Who lends. A recipe reads values that are kept anyway. It may also keep arguments that nobody else keeps: leaves with
   a gradient, such as parameters; arguments much smaller than the result (`_MUCH`); and any others where the rule says
   `lend=True`. Leaves aside, all that is kept for recipes alone is together no larger than the result, which would be
   kept otherwise: no concatenation's parts for their mean (`unread_bytes`).
5. Who computes. The first reader in a backward pass. The result is held until the last reader has read it, or the pass
   has ended, and computed again in the next backward pass over the graph. No call gets a recipe behind a chain of
   `LONGEST`; views and casts may lengthen one a little.
6. Versions. A value belongs to a tensor in one version. Before a call that may write over a tensor, the values in its
   memory that recipes read are copied (`before_overwriting`). Afterwards, what operations saved of it is marked, or,
   without a new version (dropout in eval mode), all is as before. Operators declare what they write over; of other
   calls it follows from the name. Reading something marked, a parameter, or a kept tensor that was modified later or
   unseen, raises PyTorch's error about an in-place operation. The hooks around the recording may return the memory
   itself, or (a checkpoint) values that were modified unseen in the same way.
7. Lifetimes. The recording ends with the forward pass. If Ctrl-C has ended that, the next call of a function frees what
   it holds and ends its hooks; the mode then does nothing until the next forward pass takes it off. What autograd holds
   leads to values, never to what the recording holds, and never to a tensor with a graph (`Kept` detaches it), as a
   cycle through C++ is never freed. The recording holds tensors by weak references, and storages too, so that no other
   storage gets the same address meanwhile.
8. What may never happen: a gradient that differs from autograd's. A function that draws random numbers is not called
   again (dropout keeps its mask), running statistics do not move twice, and tensors without versions are kept as they
   are. Inside other saved-tensor hooks, such as a checkpoint's, no call is followed. In doubt a tensor is kept.
9. Plans. Within a budget of bytes, a `PlannedRecording` decides call by call instead of rules 3 to 5: a plan says which
   results are kept, and recipes may read whatever else the forward pass has made.
"""

# Longer than other files: the rules and the code that keeps them belong side by side.

import weakref
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from ..saved import Kept, copied, is_ordinary
from ..torch_internals import (
    Hooks,
    address,
    current_function_mode,
    current_hooks,
    next_node_number,
    node_number,
    unpack,
)
from .inplace_calls import may_overwrite, overwritten
from .known_values import KnownValues, MadeMemory
from .nodes import value_by_node
from .report import KeptTensor, Log
from .rules import FOLLOWED, POSITIVE, Again, Function, NotFollowed, Rule, reads_only_form, result_serves
from .values import Form, Positive, Recipe, Saved, Value, unread_bytes

LONGEST = 12  # recipes between a value and kept ones; every longer chain keeps one value more

_MUCH = 16  # tensors this many times smaller than the result may be kept for it


class Recording(TorchFunctionMode):
    """Context of a forward pass in which autograd saves `Value`s instead of tensors. See the note on top of this file.

    Args:
        checkpointed_only: recompute the outputs of `CheckpointedABN`, nothing else.
        copy_parameters: copy the parameters that recipes read, because FSDP frees the gathered ones after each use.
        inputs: the network's inputs. They are kept: when a checkpoint around the network repeats the forward pass, they
            may be other tensors.
        frame: of the call that leaves this context, unless Ctrl-C ends it.
    """

    def __init__(
        self,
        *,
        checkpointed_only: bool = False,
        copy_parameters: bool = False,
        inputs: Sequence[Tensor] = (),
        frame: FrameType | None = None,
    ):
        super().__init__()
        self.outside = {address(tensor.untyped_storage()) for tensor in inputs if is_ordinary(tensor)}
        self.checkpointed_only = checkpointed_only
        self.copy_parameters = copy_parameters
        self.frame = frame
        self.abandoned = False
        self.hooks: saved_tensors_hooks | None = None
        self.outer: Hooks | None = None
        self.known = KnownValues()
        self.log = Log()
        self.kept: list[KeptTensor] = []  # at the end
        self.function: Callable[..., Any] | None = None  # that is running
        self.made = MadeMemory()
        self.arguments: tuple[Any, ...] = ()  # of the call that is running
        self.positive: Positive | None = None  # its gradient only asks which values of what it saves are positive
        self.reads_form = False  # its gradient reads no values of its input
        self.result_serves = False  # its gradient could read the result instead of the argument that it saves
        self.replaceable: list[Saved] = []  # what it has saved of that argument
        self.vectors: list[Tensor] = []  # that it has saved, and which are known to nobody else
        self.unsettled: list[tuple[Value, Tensor]] = []  # kept by it, but not yet given to the outer hooks (rule 3)

    def __enter__(self) -> "Recording":
        self.outer = current_hooks()
        self.start = next_node_number()
        self.hooks = saved_tensors_hooks(self.pack, self.unpack_hook())
        self.hooks.__enter__()
        if not self.checkpointed_only:
            super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if not self.checkpointed_only:
            super().__exit__(*error)
        self._end_hooks()
        self.forget()

    def _end_hooks(self) -> None:
        assert self.hooks is not None
        self.hooks.__exit__()
        self.hooks = None  # which refer to this recording

    def forget(self) -> None:
        self.known.settle_all(self.outer)
        self.known.clear()
        self.kept = self.log.kept()
        self.log = Log()
        self.made.clear()
        self.outer = self.frame = None

    def is_abandoned(self) -> bool:
        """Whether the forward pass has ended without leaving this context: modules call no hooks after Ctrl-C."""
        if self.frame is not None and not is_running(self.frame):
            self.abandoned, self.frame = True, None  # first: this mode sees what `forget` asks of tensors
            self.forget()
        if self.abandoned and self._is_innermost():
            self._end_hooks()
        return self.abandoned

    def leave_abandoned(self) -> bool:
        """Take the rest of an abandoned recording off; False if another context has been entered on top of it."""
        covered = not self.checkpointed_only and current_function_mode() is not self
        if not self.is_abandoned() or self.hooks is not None or covered:
            return False
        if not self.checkpointed_only:
            super().__exit__(None, None, None)
        return True

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling() or self.is_abandoned():
            return function(*args, **kwargs)
        if not may_overwrite(function, args, kwargs):
            return self._call(function, args, kwargs)
        tensors = filter(is_ordinary, overwritten(function, args, kwargs))
        writes = [self.known.before_overwriting(tensor, self.outer) for tensor in tensors]
        try:
            return self._call(function, args, kwargs, overwrites=True)
        finally:
            for write in writes:
                self.known.after_overwriting(write)

    def _call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], overwrites: bool = False
    ) -> Any:
        """Call a function, and see what can be computed again."""
        if not torch.is_grad_enabled() or not self._is_innermost():
            result = function(*args, **kwargs)
            self.made.note(function, args, kwargs, result, self.is_made)
            self.end_call(result)
            return result
        target, version, before = None, 0, None
        if overwrites and args and isinstance(args[0], Tensor) and is_ordinary(args[0]):
            target, version, before = args[0], args[0]._version, self.value_of(args[0])
        self.arguments = (*args, *kwargs.values())
        self.function = function
        self.log.call(self.arguments)
        self.result_serves = result_serves(function, args, kwargs)
        self.positive = POSITIVE.get(function)
        self.reads_form = reads_only_form(function, args, kwargs)
        self.known.settle(self.outer)
        try:
            result = self.run(function, args, kwargs)
            rule = self.rule_of(function)
            if rule is not None and isinstance(result, Tensor) and result.requires_grad and is_ordinary(result):
                if target is not None and result is target:
                    if result._version == version + 1:
                        self.decide(rule, args, kwargs, result, before)
                elif not any(result is argument for argument in (*args, *kwargs.values())):
                    self.decide(rule, args, kwargs, result, None)
            else:
                self.made.note(function, args, kwargs, result, self.is_made)
            for value, tensor in self.unsettled:
                if isinstance(value.source, Kept) and not value.sign_readers:
                    value.source = Kept(tensor, self.outer)
            self.end_call(result)
        finally:
            self.arguments, self.function = (), None
            self.result_serves, self.reads_form, self.positive = False, False, None
            self.unsettled.clear()
            self.replaceable.clear()
            self.vectors.clear()
        return result

    def _is_innermost(self) -> bool:
        """Whether our saved-tensor hooks are the innermost: no others, such as a checkpoint's, were set inside."""
        hooks = current_hooks()
        return hooks is not None and self.hooks is not None and hooks[0] is self.hooks.pack_hook

    def value_of(self, tensor: Tensor) -> Value | None:
        """The value of a tensor, if it is kept already or can be computed from others; otherwise None."""
        if (value := self.known.find(tensor)) is not None:
            return value
        if not self.is_made(tensor):
            return None
        value = value_by_node(self, tensor, tensor.grad_fn)
        return None if value is None else self.known.remember(tensor, value)

    def is_made(self, tensor: Tensor) -> bool:
        """Whether a tensor was made during this recording."""
        node = tensor.grad_fn
        if node is None or node_number(node) < self.start or not is_ordinary(tensor):
            return False
        return not self.outside or address(tensor.untyped_storage()) not in self.outside

    def pack(self, tensor: Tensor) -> Saved | Kept | Form:
        """What autograd saves in place of a tensor."""
        if self.checkpointed_only and self.is_abandoned():
            return Kept(tensor, None)
        if (
            self.outer is None
            and tensor.grad_fn is None
            and (self.is_short(tensor) or isinstance(tensor, nn.Parameter))
        ):
            self.vectors.append(tensor)
            return Kept(tensor, None)  # the quick way, for the many vectors and parameters
        if not is_ordinary(tensor):
            return Kept(tensor, self.outer)
        if self.reads_form and tensor.requires_grad:
            return Form(tensor)
        if (value := self.value_of(tensor)) is None:
            base = tensor._base
            if base is not None and base.numel() == tensor.numel() and self.is_made(base):  # a view of all of its base
                self.keep(base)
                value = self.value_of(tensor)
        saved = Saved(value or self.keep(tensor))
        self.known.depends_on_memory(saved, tensor)
        if self.result_serves and self.may_read_instead(saved.value):
            self.replaceable.append(saved)
        elif self.positive is not None and saved.value.positive in (None, self.positive):
            saved.reads_signs, saved.value.positive = True, self.positive
            saved.value.sign_readers += 1
            self.known.signs.append(weakref.ref(saved.value))
        return saved

    def keep(self, tensor: Tensor) -> Value:
        """Keep a tensor, and remember its value."""
        own = 0 if tensor.is_leaf and tensor.requires_grad else _bytes(tensor)
        value = Value(Kept(tensor, None), address(tensor.untyped_storage()), own)
        if self.outer is not None:
            if self.arguments:  # the running call may yet get a recipe
                self.unsettled.append((value, tensor))
            else:
                value.source = Kept(tensor, self.outer)
        self.known.depends_on_memory(value, tensor)
        self.note_kept(value, tensor)
        return self.known.remember(tensor, value)

    def copied(self, value: Value, tensor: Tensor) -> None:
        """A call has copied an argument of this value, because it is going to overwrite it."""

    # What a `PlannedRecording` does in another way

    longest = LONGEST

    def unpack_hook(self) -> Callable[[Any], Tensor]:
        return unpack

    def run(self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return function(*args, **kwargs)

    def end_call(self, result: Any) -> None:
        """A call has ended, and its result has a value."""

    def is_short(self, tensor: Tensor) -> bool:
        """Whether a tensor without a graph is kept without further ado."""
        return tensor.dim() < 2

    def rule_of(self, function: Function) -> Rule | None:
        return FOLLOWED.get(function)

    def decide(
        self, rule: Rule, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor, before: Value | None
    ) -> None:
        """Give the result of a call a recipe, if the rules say so.

        `before`: if the call overwrote its first argument, which then is the result, the value that it had before.
        """
        if (again := self.again(rule, args, kwargs, result, before)) is not None:
            self.follow(again, result)

    def may_read_instead(self, value: Value) -> bool:
        """Whether a result may be read instead of an argument of this value."""
        return isinstance(value.source, Recipe)

    def note_kept(self, value: Value, tensor: Tensor) -> None:
        self.log.keep(value, tensor, self.function)

    def argument_value(self, tensor: Tensor, result: Tensor, before: Value | None) -> Value | None:
        """The value of an argument, if a recipe may read it."""
        return self.value_before(result, before) if tensor is result else self.value_of(tensor)

    def bytes_for_nothing_else(self, again: Again) -> int:
        """Bytes that are kept for this recipe alone."""
        return unread_bytes(argument for argument in again.arguments if isinstance(argument, Value))

    def again(
        self, rule: Rule, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor, before: Value | None
    ) -> Again | None:
        """How to repeat a call, if all that this needs is kept or may be lent (rules 3 and 4)."""
        unkept: list[Tensor] = []

        def find(tensor: Tensor, lend: bool = False) -> Value | Tensor:
            copied = self.copy_parameters and isinstance(tensor, nn.Parameter)
            if not is_ordinary(tensor):
                raise NotFollowed
            value = self.argument_value(tensor, result, before)
            if value is not None and not copied:
                return value
            stays = tensor.is_leaf and tensor.requires_grad
            lend = _MUCH * _bytes(tensor) <= result.nbytes or ((lend or stays) and not copied)
            if tensor is result or not lend:
                raise NotFollowed
            unkept.append(tensor)
            return tensor

        try:
            again = rule(find, args, kwargs, result)
        except NotFollowed:
            return None
        lent = sum(self._lent_bytes(t, result) for t in unkept if not (t.is_leaf and t.requires_grad))
        return again if lent + self.bytes_for_nothing_else(again) <= result.nbytes else None

    def follow(self, again: Again, result: Tensor) -> None:
        """Give the result of a call a recipe."""
        arguments = [self._lent(a, result) if isinstance(a, Tensor) else a for a in again.arguments]
        recipe = Recipe(again.function, arguments, result, fresh=again.fresh, can_overwrite=again.can_overwrite)
        if recipe.depth > self.longest:
            return
        own = self.known.find(result)
        if own is None:
            own = self.known.remember(result, Value(recipe))
        else:  # the call has saved its own result
            own.become(recipe)
        for saved in self.replaceable:
            saved.read_instead(own)
        self._follow_base(result, own)

    def _follow_base(self, result: Tensor, own: Value) -> None:
        """Functions such as `F.instance_norm` return a view of all that they make: other views follow from it."""
        base = result._base
        if base is None or base.numel() != result.numel() or base.dtype != result.dtype or not self.is_made(base):
            return
        if not (base.is_contiguous() and result.is_contiguous()):
            return
        if own.reads_storage(address(base.untyped_storage())):  # a view of an argument
            return
        recipe, value = Recipe(Tensor.view, (own, base.shape), base), self.known.find(base)
        if value is None:
            self.known.remember(base, Value(recipe))
        elif isinstance(value.source, Kept):
            value.become(recipe)

    def value_before(self, overwritten: Tensor, before: Value | None) -> Value | None:
        """The value that a tensor had before a call overwrote it, unless it can only be read from the same memory."""
        value = before or self.known.find(overwritten, overwrites=1)  # from a copy
        if value is not None and value.reads_storage(address(overwritten.untyped_storage())):
            return None
        return value

    def _lent(self, tensor: Tensor, result: Tensor) -> Value:
        """Keep an argument for the recipe of a result."""
        if self._is_copied(tensor, result):
            return Value(Kept(copied(tensor), self.outer), bytes=self._lent_bytes(tensor, result))
        return self.lend(tensor)

    def _lent_bytes(self, tensor: Tensor, result: Tensor) -> int:
        return min(_bytes(tensor), tensor.nbytes) if self._is_copied(tensor, result) else _bytes(tensor)

    def _is_copied(self, tensor: Tensor, result: Tensor) -> bool:
        """Whether a recipe gets a copy of an argument (rule 4)."""
        small = _MUCH * _bytes(tensor) <= result.nbytes
        if tensor.requires_grad:
            return small and tensor.is_leaf and not any(tensor is vector for vector in self.vectors)
        return small or not self.made.has(tensor)

    def lend(self, tensor: Tensor) -> Value:
        """Keep a tensor for a recipe, if it has no value yet."""
        if self.copy_parameters and isinstance(tensor, nn.Parameter):
            return Value(Kept(tensor.detach().clone(), None))
        value = self.value_of(tensor)
        if value is None and isinstance(tensor, nn.Parameter):  # it stays where it is
            return Value(Kept(tensor, None))
        if value is None:
            value = self.keep(tensor)
        return value


def is_running(frame: FrameType) -> bool:
    """Whether a call has not ended yet. If it has, the variables that an exception's traceback holds are freed."""
    try:
        frame.clear()
    except RuntimeError:
        return True
    return False


def _bytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()
