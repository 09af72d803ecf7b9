"""Record a forward pass so that autograd keeps few of its tensors, and computes the others again."""

from collections.abc import Callable
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules._functions import SyncBatchNorm
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from .bn_act import is_node, recompute_output
from .followed import FOLLOWED, NotFollowed, Rule, may_overwrite, normalised
from .known_values import KnownValues
from .saved import Hooks, Kept, current_hooks
from .values import Recipe, Value, laid_out

LONGEST = 12  # recipes between a value and kept ones; every longer chain keeps one value more

_MUCH = 16  # times as many bytes as what is kept beside
_SYNCHRONISED = SyncBatchNorm._backward_cls
_PLAIN = (Tensor, FakeTensor)  # other subclasses may compute anything
_COPIES = frozenset(["ToCopyBackward0", "CloneBackward0"])  # made inside an operation


class Recording(TorchFunctionMode):
    """Context of a forward pass in which autograd saves `Value`s instead of tensors.

    As a function mode it sees the calls, with the versions of their arguments; by its saved-tensor hooks it sees the
    tensors that autograd saves, most of them during those calls. What is kept goes through the hooks around it.

    Args:
        checkpointed_only: compute the outputs of `CheckpointedABN` again, nothing else.
        copy_parameters: for recipes, because their memory may be gone when they are read (FSDP).
    """

    def __init__(self, *, checkpointed_only: bool = False, copy_parameters: bool = False):
        super().__init__()
        self.checkpointed_only = checkpointed_only
        self.copy_parameters = copy_parameters
        self.outer: Hooks | None = None
        self.known = KnownValues()
        self.arguments: tuple[Any, ...] = ()  # of the call that is running
        self.unsettled: list[tuple[Value, Tensor]] = []  # not yet given to the outer hooks

    def __enter__(self) -> "Recording":
        self.outer = current_hooks()
        self.start = torch.autograd._get_sequence_nr()
        self.hooks = saved_tensors_hooks(self._pack, methodcaller("get"))
        self.hooks.__enter__()
        if not self.checkpointed_only:
            super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if not self.checkpointed_only:
            super().__exit__(*error)
        self.hooks.__exit__(*error)
        self.known.clear()
        self.outer = None
        del self.hooks  # which refer to this recording

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling() or not self._is_innermost():
            return function(*args, **kwargs)
        target, version, before = None, 0, None
        if may_overwrite(function, args, kwargs):
            for tensor in tree_leaves((args[:1] or kwargs.get("input"), kwargs.get("out"))):
                if isinstance(tensor, Tensor):
                    self.known.before_overwriting(tensor, self.outer)
            if torch.is_grad_enabled() and args and isinstance(args[0], Tensor):
                target, version, before = args[0], args[0]._version, self.value_of(args[0])
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        self.arguments = args
        try:
            result = function(*args, **kwargs)
            rule = FOLLOWED.get(function)
            if rule is not None and type(result) in _PLAIN and result.requires_grad:
                if target is not None and result is target:
                    if result._version == version + 1:
                        self._follow(rule, args, kwargs, result, before)
                elif not any(result is argument for argument in (*args, *kwargs.values())):
                    self._follow(rule, args, kwargs, result, None)
            for value, tensor in self.unsettled:
                if isinstance(value.source, Kept):
                    value.source = Kept(tensor, self.outer)
        finally:
            self.arguments = ()
            self.unsettled.clear()
        return result

    def _is_innermost(self) -> bool:
        """Whether autograd saves by this context: not inside other saved-tensor hooks, such as a checkpoint's."""
        hooks = current_hooks()
        return hooks is not None and hooks[0] is self.hooks.pack_hook

    def value_of(self, tensor: Tensor) -> Value | None:
        """The value of a tensor that is kept already, or that can be computed from others."""
        if (value := self.known.find(tensor)) is not None:
            return value
        node = tensor.grad_fn
        if node is None or not self._made(tensor):
            return None
        if tensor._is_view():
            return self._value_of_view(tensor)
        if is_node(node):
            if node.strategy.recompute_output and tensor._version == node.output_version:
                return self.known.remember(tensor, Value(Recipe(recompute_output, (node,), tensor)))
        elif type(node) is _SYNCHRONISED:
            return self._value_of_synchronised_norm(tensor, node)
        elif self.arguments and type(node).__name__ in _COPIES and tensor._version == 0:
            return self._value_of_copy(tensor, node)
        return None

    def _made(self, tensor: Tensor) -> bool:
        """Whether a tensor was made in this context. Of others, a repetition of the forward pass may get copies."""
        return tensor.grad_fn is not None and tensor.grad_fn._sequence_nr() >= self.start

    def _value_of_view(self, tensor: Tensor) -> Value | None:
        base = tensor._base
        if base is None or type(base) not in _PLAIN or tensor.dtype != base.dtype:
            return None
        if tensor.is_conj() or tensor.is_neg() or base.is_conj() or base.is_neg():
            return None
        if (value := self.value_of(base)) is None:
            return None
        offset = tensor.storage_offset() - base.storage_offset()
        arguments = (value, base.stride(), tensor.shape, tensor.stride(), offset)
        return self.known.remember(tensor, Value(Recipe(_view, arguments, tensor)))

    def _value_of_synchronised_norm(self, tensor: Tensor, node: Any) -> Value | None:
        """The output of `nn.SyncBatchNorm`, whose node has everything but the bias, unless that is frozen."""
        x, weight, mean, invstd, *_ = (saved.data for saved in node._raw_saved_tensors)
        bias = None if weight is None else getattr(node.next_functions[2][0], "variable", None)
        if bias is None or tensor._version:
            return None
        recipe = Recipe(normalised, (x, mean, invstd, weight, self._lend(bias)), tensor)
        return self.known.remember(tensor, Value(recipe))

    def _value_of_copy(self, tensor: Tensor, node: Any) -> Value | None:
        """A copy made inside the running call: autocast converts arguments, silu_ copies the one that it overwrites."""
        source, number = node.next_functions[0]
        for argument in self.arguments:
            if not isinstance(argument, Tensor) or argument.grad_fn is not source or argument.output_nr != number:
                continue
            if argument.shape != tensor.shape or argument.device != tensor.device:
                continue
            value = self.value_of(argument)
            if argument.dtype == tensor.dtype:
                return self.known.remember(tensor, value or self.known.remember(argument, self._keep(tensor)))
            if value is not None:
                recipe = Recipe(Tensor.to, (value, tensor.dtype), tensor)
                return self.known.remember(tensor, Value(recipe))
        return None

    def _pack(self, tensor: Tensor) -> Value | Kept:
        """What autograd saves in place of a tensor."""
        if self.outer is None and tensor.grad_fn is None and (tensor.dim() < 2 or isinstance(tensor, nn.Parameter)):
            return Kept(tensor, None)  # there are many, and nobody looks for their values
        if (value := self.value_of(tensor)) is None:
            base = tensor._base
            if base is not None and base.numel() == tensor.numel() and self._made(base):  # all of it, reshaped
                self._keep(base)
                value = self.value_of(tensor)
        value = value or self._keep(tensor)
        value.saved = True
        value.add_reader()
        if isinstance(value.source, Recipe):
            self.known.depends_on_memory(value, tensor)
        return value

    def _keep(self, tensor: Tensor) -> Value:
        value = Value(Kept(tensor, None), tensor.untyped_storage()._cdata)
        if self.outer is not None:
            if self.arguments:  # the call may yet turn out to be one that is followed
                self.unsettled.append((value, tensor))
            else:
                value.source = Kept(tensor, self.outer)
        return self.known.remember(tensor, value)

    def _follow(
        self, rule: Rule, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor, before: Value | None
    ) -> None:
        """Give the result of a call a recipe, if all that it needs is kept. `before`: of an overwritten result."""
        unkept: list[Tensor] = []

        def find(tensor: Tensor, lend: bool = False) -> Value | Tensor:
            copied = self.copy_parameters and isinstance(tensor, nn.Parameter)
            value = self._before(result, before) if tensor is result else self.value_of(tensor)
            if value is not None and not copied:
                return value
            stays = tensor.is_leaf and tensor.requires_grad
            lend = _MUCH * _bytes(tensor) <= result.nbytes or ((lend or stays) and not copied)
            if tensor is result or not lend:
                raise NotFollowed
            unkept.append(tensor)
            return tensor

        try:
            function, *arguments = rule(find, args, kwargs, result)
        except NotFollowed:
            return
        if sum(_bytes(tensor) for tensor in unkept if not tensor.is_leaf) > result.nbytes:
            return
        arguments = [self._lend(argument) if isinstance(argument, Tensor) else argument for argument in arguments]
        recipe = Recipe(function, arguments, result)
        if recipe.depth > LONGEST:
            return
        own = self.known.find(result)
        if own is None:
            self.known.remember(result, Value(recipe))
        else:  # the call has saved its own result
            own.become(recipe)
            self.known.depends_on_memory(own, result)

    def _before(self, overwritten: Tensor, before: Value | None) -> Value | None:
        """The value that a tensor had before a call overwrote it, unless that was in the same memory."""
        value = before or self.known.find(overwritten, overwrites=1)  # from a copy
        if value is not None and value.reads_storage(overwritten.untyped_storage()._cdata):
            return None
        return value

    def _lend(self, tensor: Tensor) -> Value:
        """Keep a tensor for recipes."""
        if self.copy_parameters and isinstance(tensor, nn.Parameter):
            return Value(Kept(tensor.detach().clone(), None))
        value = self.value_of(tensor)
        if value is None and isinstance(tensor, nn.Parameter):  # it stays where it is
            return Value(Kept(tensor, None))
        if value is None:
            value = self._keep(tensor)
            self.known.depends_on_memory(value, tensor)
        return value


def _view(base: Tensor, strides: tuple[int, ...], shape: torch.Size, stride: tuple[int, ...], offset: int) -> Tensor:
    """A view of a tensor that was computed again, maybe with other strides than it had."""
    base = laid_out(base, strides)
    return base.as_strided(shape, stride, base.storage_offset() + offset)


def _bytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()
