"""Registry of the values of a forward pass: pack, find and keep them, and derive values from autograd's nodes."""

import sys
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn

from ...inputs import tensors_in
from ...norms.backends.eager import normalised
from ...norms.bn_act import BatchNormActivation, is_node, recompute_output
from ...saved import ByStorage, Gone, Kept, ShapeOnly, copied, current_stream, form_of, is_ordinary, laid_out, view
from ...torch_internals import (
    SYNCHRONISED,
    Hooks,
    address,
    argument_copied_by,
    changing_mode,
    next_node_number,
    node_class,
    node_number,
    node_of,
    packed_by_function,
    storage_uses,
    without_function_modes,
)
from ..held.calls import Call, Inside, before_overwriting
from ..held.signs import Positive, Signs
from ..held.values import (
    Again,
    Memory,
    Recipe,
    Saved,
    Value,
    kept_bytes_below,
    saved_value,
)
from ..table.functions import Row
from .advice import MEMORY, derived_from
from .report import Log

_SHORT = 2**12  # entries: with a plan, vectors from this size on get values
# With a plan, the source of a copy (e.g. a projection to q, k and v, copied in parts) is kept instead of the copy, if
# it has at most this many times the bytes: it may itself be recomputed.
_COPIES_ARE_WORTH = 4
DERIVING = {node_class(BatchNormActivation), SYNCHRONISED}  # nodes from which the values of results are derived
NOT_KNOWN: Any = (None, 0, None)  # in place of a tensor's reference, version and value
NO_MEMORY: Any = (None, None)


class Registry:
    """Registry of one forward pass: each living tensor's value, and the values kept in each storage.

    Its subclass `Trace` numbers the values of a counted step, by the same rules. `outer`: the saved-tensor hooks around
    the recording. `by_plan`: a plan decides what is kept (rule 13). For other arguments see `Recording`.
    """

    kept: type[Kept] = Kept  # the class that holds a kept tensor

    def __init__(
        self,
        inputs: Sequence[Tensor],
        outer: Hooks | None,
        copy_parameters: bool,
        by_plan: bool,
    ):
        self.start = next_node_number()
        self.outside = {address(tensor.untyped_storage()) for tensor in inputs if is_ordinary(tensor)}
        self.outer = outer
        self.copy_parameters = copy_parameters
        self.by_plan = by_plan
        # A vector without a grad_fn is saved directly, without a `Value`, if it has fewer elements.
        self.short = _SHORT if self.by_plan else sys.maxsize
        self.short_rows = _SHORT  # so are a norm's statistics of rows
        self.log = Log()
        self.call: Call | None = None  # the running one
        # A tensor's value, by its id, with a weak reference to the tensor and its version. The sign mask that advice
        # makes of it has the key (id, function), because other consumers need the tensor itself.
        self.value_by_id: dict[Any, tuple[weakref.ref[Tensor], int, Value]] = {}
        self.memories: ByStorage[Memory] = ByStorage()
        self.unnoted: list[Value | Kept] = []  # kept by advice, or parameters of recipes, and not yet in `memories`
        self.dead: list[Gone] = []  # those references in `value_by_id` whose tensors are freed
        self.signs: list[weakref.ref[Value]] = []  # values with sign consumers, in the order of these saves
        self.gone: list[Value] = []  # values in `signs` whose tensors have been freed
        self.without_gradient: ByStorage[Any] = ByStorage()  # memory made by calls: their sites, or True
        self.exposed: ByStorage[bool] = ByStorage()  # memory that the program may change unseen
        self.refused: type | None = None  # a mode under which a call would have got a recipe: see `changing_mode`
        self.unseen = ""  # what has hidden calls from the recording, such as a checkpoint
        self.saved_outside: list[Any] = []  # what autograd holds for tensors saved outside calls

    def clear(self, has_raised: bool = False) -> None:
        """The forward pass has ended; if by an error, perhaps a checkpoint's, whose hooks take no more tensors."""
        for reference in [] if has_raised else self.signs:
            value = reference()
            if value is not None:
                value.settle(self.outer, at_end=True)  # a checkpoint needs the same order each time
        self.value_by_id = {}
        self.unnoted = []
        self.dead = []
        self.signs = []
        self.gone = []
        self.exposed = ByStorage()
        self.memories.clear()
        self.without_gradient.clear()
        self.outer = None

    def value_of(self, tensor: Tensor) -> Value | None:
        """The value of a tensor, if it is kept already or can be computed from others; otherwise None."""
        value = self.find(tensor)
        if value is not None or tensor.is_leaf:
            return value
        derivation = self._derivation(tensor)
        if derivation is None:
            return None
        value = Value(Recipe(derivation, tensor)) if isinstance(derivation, Again) else derivation
        return self.remember(tensor, value)

    def derived(self, tensor: Tensor) -> Value | None:
        """`value_of` for calls with advice: faster if the tensor is a view of one in `value_by_id`."""
        base = tensor._base
        if base is None:
            return self.value_of(tensor)
        reference, version, base_value = self.value_by_id.get(id(base), NOT_KNOWN)
        if base_value is None or reference() is not base or version != tensor._version:
            return self.value_of(tensor)
        form = form_of(tensor, base)
        if form is None:
            return None
        value = Value(Recipe(Again(view, (base_value, *form)), tensor))
        self.value_by_id[id(tensor)] = weakref.ref(tensor), tensor._version, value
        return value

    def find(self, tensor: Tensor, *, overwrites: int = 0) -> Value | None:
        """The value of a tensor now, or `overwrites` versions ago; None if it is not known."""
        reference, version, value = self.value_by_id.get(id(tensor), NOT_KNOWN)
        is_known = value is not None and reference() is tensor and version == tensor._version - overwrites
        return value if is_known else None

    def is_read(self, tensor: Tensor, value: Value | None) -> bool:
        """Whether something is saved or kept in the memory of a tensor. `value`: the tensor's, if it has one."""
        if value is not None and type(value.source) is Kept:
            return True
        storage = tensor.untyped_storage()  # the tensor and this object use it
        return storage_uses(address(storage)) > 2 or self.memories.get(storage) is not None

    def may_drop(self, row: Row, arguments: Sequence[Any], result: Tensor) -> bool:
        """Whether a call's result may be recomputed. One without a gradient only by a plan, if a layer is frozen."""
        if result.grad_fn is not None:
            return True
        if not (self.by_plan and row.is_slow and torch.is_grad_enabled()) or result.is_inference():
            return False
        tensors = tensors_in(arguments)
        reads_parameter = any([isinstance(tensor, nn.Parameter) for tensor in tensors])
        return reads_parameter and not any([tensor.requires_grad for tensor in tensors])

    def is_made(self, tensor: Tensor) -> bool:
        """Whether a tensor was made during this forward pass."""
        node = node_of(tensor)
        if node is None or node_number(node) < self.start or not is_ordinary(tensor):
            return False
        return not self.outside or address(tensor.untyped_storage()) not in self.outside

    def remember(self, tensor: Tensor, value: Value) -> Value:
        """Note the value of a tensor in its current version, unless its values may change unseen."""
        if not (self.exposed.by_address and self.may_change_unseen(tensor)):
            self.value_by_id[id(tensor)] = Gone(tensor, self.dead, id(tensor)), tensor._version, value
        return value

    def keep(self, tensor: Tensor) -> Value:
        """Keep a tensor, and remember its value."""
        storage = tensor.untyped_storage()
        stays = is_parameter(tensor) or (tensor.is_leaf and tensor.requires_grad)
        bytes = 0 if stays else storage.nbytes()
        # An alias of a tensor that the pass has made without a gradient, which would live until its end otherwise.
        is_alias = not (stays or tensor.requires_grad) and bool(self.without_gradient.get(storage))
        value = Value(self.kept(tensor.detach() if is_alias else tensor, None), address(storage), bytes)
        value.why = self.log.why(tensor)
        if self.outer is not None:
            if self.call is not None:  # the running call may still get a recipe
                self.call.unsettled.append((value, tensor))
            else:
                value.source = Kept(tensor, self.outer)
        self._note_kept(value, storage)
        return self.remember(tensor, value)

    def kept_later(self, tensor: Tensor) -> Value:
        """`keep` for calls with advice: its memory is noted only before a call that writes, or rules ask."""
        value = Value(Kept(tensor, None, detaches=False))
        self.unnoted.append(value)
        self.value_by_id[id(tensor)] = weakref.ref(tensor), tensor._version, value
        return value

    def sign_mask(self, tensor: Tensor, positive: Positive | None) -> Value | None:
        """The value of a saved tensor of which only the sign mask is kept; None if there can be none."""
        if positive is None or not is_ordinary(tensor):
            return None
        key = id(tensor), positive
        reference, version, value = self.value_by_id.get(key, NOT_KNOWN)
        if value is None or reference() is not tensor or version != tensor._version:
            value = Value(Signs(tensor, positive, None))
            self.value_by_id[key] = weakref.ref(tensor), tensor._version, value
        return value

    def note_memories(self) -> None:
        """Note the memories of what recipes read: before a call that writes, and before rules ask what is kept."""
        while self.unnoted:
            value = self.unnoted.pop()
            kept: Any = value.source if isinstance(value, Value) else value
            try:
                storage = kept.packed.untyped_storage()
            except NotImplementedError:  # sparse
                continue
            if isinstance(value, Value):
                value.storage = address(storage)
                value.bytes = storage.nbytes()
            self._note_kept(value, storage)

    def stays(self, tensor: Tensor) -> Kept:
        """A tensor that stays where it is, such as a parameter, for a recipe: copied before a call writes over it.

        What autograd holds for it is not: it raises PyTorch's error.
        """
        kept = Kept(tensor, None)
        self.unnoted.append(kept)
        return kept

    def before_setting_data(self, tensor: Tensor, source: Tensor) -> None:
        """`tensor.data = source` will give a tensor the memory of another, but no new version."""
        self.read_as_pytorch(tensor)
        if self.is_made(tensor):
            self.read_as_pytorch(source)
            self.exposed.put(source.untyped_storage(), True)

    def expose(self, tensor: Tensor) -> None:
        """The program gets access to a made tensor's memory that changes no version, as `.data` and `.numpy()` do."""
        storage = tensor.untyped_storage()
        if isinstance(tensor, nn.Parameter) or self.exposed.get(storage):
            return
        if self._tensors_in(storage) or self.is_made(tensor) or self.has_made(tensor):
            self.exposed.put(storage, True)
            self.read_as_pytorch(tensor)

    def read_as_pytorch(self, tensor: Tensor) -> None:
        """Let autograd read what it has saved of a tensor's memory from there. Recipes get copies."""
        self.note_memories()
        storage = tensor.untyped_storage()
        memory = self.memories.get(storage)
        if memory is not None:
            self.read_memory(memory, tensor)
            before_overwriting(tensor, self.memories, self.outer)
        self.forget(storage)

    def read_memory(self, memory: Memory, tensor: Tensor) -> None:
        """Let autograd read what it has saved of a memory from the memory itself. `tensor`: is in it."""
        for saved, saved_tensor in memory.take_saves():
            saved.read_memory(saved_tensor, tensor, self.outer)

    def forget(self, storage: UntypedStorage) -> None:
        """The tensors in a storage have other values now, though in the same version."""
        for key in self._tensors_in(storage):
            del self.value_by_id[key]

    def _tensors_in(self, storage: UntypedStorage) -> list[Any]:
        """The keys in `value_by_id` of the tensors in a storage."""
        place = address(storage)
        tensor_by_key = {key: reference() for key, (reference, *_) in self.value_by_id.items()}
        return [
            key
            for key, tensor in tensor_by_key.items()
            if tensor is not None and is_ordinary(tensor) and address(tensor.untyped_storage()) == place
        ]

    def may_change_unseen(self, tensor: Tensor) -> bool:
        """Whether a tensor has no version, or the program may change its memory without a new one."""
        return not is_ordinary(tensor) or bool(self.exposed.by_address and self.exposed.get(tensor.untyped_storage()))

    def copied(self, tensor: Tensor) -> Value:
        """Keep a copy of a tensor for a recipe, as the tensor may change."""
        bytes = min(tensor.untyped_storage().nbytes(), tensor.nbytes)
        return Value(Kept(copied(tensor), self.outer), bytes=bytes)

    def keep_for_recipe(self, tensor: Tensor) -> Value | Kept:
        """The value of a tensor; if it has none, it is kept for a recipe."""
        if self.copy_parameters and is_parameter(tensor):
            return Kept(copied(tensor), None)
        value = self.value_of(tensor)
        if value is None and isinstance(tensor, nn.Parameter):
            return self.stays(tensor)
        return value or self.keep(tensor)

    def is_lost(self, value: Value, overwritten: Tensor) -> bool:
        """Whether a value can only be read from the memory of a tensor that a call has overwritten."""
        return value.reads_storage(self.place(overwritten))

    def note_read_when_overwritten(self, value: Value, overwritten: Tensor) -> None:
        """A recipe reads a value that a call has overwritten, and that is not lost. A counted step notes it."""

    def place(self, tensor: Tensor) -> int:
        """Identifies a tensor's memory: the address of its storage."""
        return address(tensor.untyped_storage())

    def _note_kept(self, value: Value | Kept, storage: UntypedStorage) -> None:
        """Note that a value, or a tensor that recipes read, is kept in a storage."""
        by_address = self.memories.by_address  # in place of `get` and `put`, which are calls
        place = address(storage)
        reference, memory = by_address[place] if place in by_address else NO_MEMORY
        if memory is None or reference() is not storage:
            memory = Memory()
            by_address[place] = weakref.ref(storage), memory
        memory.values += (weakref.ref(value),)

    def _derivation(self, tensor: Tensor) -> Again | Value | None:
        """How to recompute a tensor that is no call's result, or the value of another tensor that equals it."""
        node: Any = tensor.grad_fn
        if not self.is_made(tensor):
            return None
        if tensor._is_view():
            return self._of_base(tensor)
        if self.exposed.by_address and self.may_change_unseen(tensor):
            return None
        if is_node(node):
            return self._of_our_norm(node, tensor) if node.strategy.recompute_output else None
        if tensor._version != 0:
            return None
        if type(node) is SYNCHRONISED:
            mode = changing_mode()
            if mode is None:
                return self._of_synchronised_norm(node, packed_by_function(node))
            self.refused = mode
            return None
        return None if self.call is None else self._of_copied_argument(tensor, node, self.call)

    def _of_our_norm(self, node: Any, tensor: Tensor) -> Again | None:
        """The output of a norm that computes it again in its own backward pass, such as `CheckpointedABN`."""
        if isinstance(node.output_version, type):
            self.refused = node.output_version
        if tensor._version != node.output_version:
            return None
        packs = [Kept(pack, None) if isinstance(pack, Tensor) else pack for pack in packed_by_function(node)]
        if not all([hasattr(pack, "get") for pack in packs]):  # hooks of the program have packed them
            return Again(checkpointed_output, (node, None, (), self.exposed))
        x = self._argument_in(packs[0]) if packs else None
        if x is None and packs:
            return None
        return Again(checkpointed_output, (node, x, packs[1:], self.exposed))

    def _of_base(self, tensor: Tensor) -> Again | Value | None:
        base = tensor._base
        form = None if base is None else form_of(tensor, base)
        value = None if base is None or form is None else self.value_of(base)
        if base is None or form is None or value is None:
            return None
        # Tensor subclasses return views of whole results, but not when a checkpoint repeats the pass, which must save
        # the same tensors.
        is_whole = form == (base.stride(), base.shape, base.stride(), 0)
        return value if self.outer is not None and is_whole else Again(view, (value, *form))

    def _of_synchronised_norm(self, node: Any, packed: tuple[Any, ...]) -> Again | None:
        """The output of `nn.SyncBatchNorm`. Its node saves all but the bias, which is found only if it is trained."""
        x = self._argument_in(packed[0])
        weight, mean, invstd = map(saved_value, packed[1:4])
        bias = None if weight is None else getattr(node.next_functions[2][0], "variable", None)
        if bias is None or not all([isinstance(saved, (Value, Kept)) for saved in (x, mean, invstd)]):
            return None
        return Again(normalised, (x, mean, invstd, weight, self.keep_for_recipe(bias)), fresh=True)

    def _argument_in(self, packed: Any) -> Any:
        """What a recipe reads for an argument that a norm's node holds; None if its values may change unseen."""
        value = saved_value(packed)
        kept = value.source if isinstance(value, Value) else value
        if type(kept) is not Kept or kept.hooks is not None:
            return value
        if self.exposed.by_address and self.may_change_unseen(kept.packed):
            return None
        if value is kept:
            value = Value(kept)
            self.unnoted.append(value)
        return value

    def _of_copied_argument(self, tensor: Tensor, node: Any, call: Call) -> Again | Value | None:
        """A copy of an argument, made inside the running call: cast by autocast, reshaped by matrix products, or made
        by `silu_` before it overwrites it.
        """
        if node_number(node) < call.first_node:  # a copy that the program made, perhaps of an earlier version
            return None
        is_reshaped = type(node).__name__ == "UnsafeViewBackward0"
        argument = argument_copied_by(node, call.arguments)
        if argument is None or argument.numel() != tensor.numel() or argument.device != tensor.device:
            return None
        value = self._smaller_value_of(argument, tensor)
        derivation: Again | Value | None
        if argument.dtype != tensor.dtype:
            derivation = None if value is None or is_reshaped else Again(Tensor.to, (value, tensor.dtype))
        elif is_reshaped:
            derivation = None if value is None else Again(Tensor.reshape, (value, tensor.shape))
        else:
            derivation = self.kept_in_copy(value, argument, tensor)
        if derivation is not None:
            call.copied[id(tensor)] = argument
        return derivation

    def kept_in_copy(self, value: Value | None, argument: Tensor, copy: Tensor) -> Again | Value:
        """The value of a copy. If nothing else keeps the argument, it is kept in the copy instead.

        Kernels round otherwise for other strides, so argument and copy are each restored with their own.
        """
        is_fixed = value is not None and self.is_fixed(value, argument)
        is_alike = copy.stride() == argument.stride()
        if value is None or is_fixed or (value.unread and not is_alike and self.call and self.call.overwrites):
            kept = self.keep(copy)
            if is_alike:
                self.remember(argument, kept)
            elif value is None:
                again = Again(laid_out, (kept, argument.stride()))
                self.remember(argument, Value(Recipe(again, argument)))
            return kept
        if not is_alike:
            return Again(laid_out, (value, copy.stride()))
        if value.unread:
            value.source = self.kept(copy, None)
            value.storage = self.place(copy)
            self._note_kept(value, copy.untyped_storage())
        return value

    def is_fixed(self, value: Value, argument: Tensor) -> bool:
        """Whether a value can only be read from the memory of an argument."""
        self.note_memories()
        return not value.unread and value.reads_storage(self.place(argument))

    def _smaller_value_of(self, argument: Tensor, copy: Tensor) -> Value | None:
        """The value of an argument, if keeping it takes no more bytes than its copy (with a plan: a few times more)."""
        value = self.value_of(argument)
        call = self.call
        if call is not None and call.is_advised and call.site.advice & derived_from(call.arguments, argument):
            # An earlier pass has found that it is worth while.
            is_kept_here = value is None and not (is_parameter(argument) or call.overwrites)
            return self.keep(argument) if is_kept_here else value
        self.note_memories()
        most = _COPIES_ARE_WORTH * copy.nbytes if self.by_plan else copy.nbytes
        return None if value is None or kept_bytes_below([value], only_unread=True) > most else value

    def pack(self, tensor: Tensor) -> Saved | Kept | ShapeOnly:
        """Return what autograd saves in place of a tensor: the tensor itself, only its shape, or its value."""
        if self.call is not None:
            is_known = id(tensor) in self.value_by_id or id(tensor._base) in self.value_by_id
            saved = self.packed(tensor)
            self.call.packed.append((tensor, saved, is_known))
            return saved
        with without_function_modes():  # the recording sees no calls of ours
            saved = self.packed(tensor)
        if isinstance(saved, Saved):
            self.saved_outside.append(weakref.ref(saved))
        return saved

    def packed(self, tensor: Tensor) -> Saved | Kept | ShapeOnly:
        """See `pack`."""
        call = self.call or Call(type(None), Row(), (), {})  # outside of calls: an empty one
        call.saves += 1
        row = call.row
        if self.outer is None and self.is_simple(tensor):
            return self.kept(tensor, None)
        if not is_ordinary(tensor):
            kept = self.kept(tensor, self.outer)
            self.log.keep_other(kept, tensor)
            return kept
        if row.reads_shape_only is not None and tensor.requires_grad and row.reads_shape_only(call.args, call.kwargs):
            return ShapeOnly(tensor)
        if row.narrow is None or tensor.dtype is not torch.int64:
            return self._saved(tensor, call)
        value = self.find(tensor)
        if value is None:
            small = self.narrowed(tensor, row.narrow(call.args, call.kwargs))
            value = self.remember(tensor, Value(Recipe(Again(Tensor.to, (small, torch.int64)), tensor)))
        return Saved(value, self.memories, tensor)

    def is_simple(self, tensor: Tensor) -> bool:
        """Whether a saved tensor needs no value: parameters, their views, short vectors, and statistics of rows.

        Recipes read copies of these. So they need not notice when batch norms update running statistics, or views. The
        network's inputs have values.
        """
        base = tensor._base
        if not tensor.is_leaf:
            return isinstance(base, nn.Parameter)
        size = tensor.numel()
        if isinstance(tensor, nn.Parameter) or (tensor.ndim < 2 and size < self.short):
            return True
        is_of_vector = base is not None and base.ndim < 2 and base.numel() < self.short_rows
        is_of_vector = is_of_vector and address(tensor.untyped_storage()) not in self.outside
        return is_of_vector or (tensor.ndim > 1 and tensor.size(-1) == 1 and size < self.short_rows)

    def narrowed(self, indices: Tensor, dtype: torch.dtype) -> Value:
        """Keep the indices that a call saves, in a smaller dtype."""
        small = indices.to(dtype)
        kept = Value(Kept(small, self.outer), address(small.untyped_storage()), small.nbytes)
        self.log.keep(kept, small)
        return kept

    def _saved(self, tensor: Tensor, call: Call) -> Saved:
        """What autograd holds for a tensor with a value."""
        row = call.row
        value = self.value_of(tensor)
        if value is None:
            value = self._keep_with_base(tensor, call)
        elif not value.consumers and value.unread:
            self.log.keep(value, tensor)
        base = tensor._base
        base_value = None if base is None else self.find(base)
        if base is not None and base_value is not None and base_value is not value:
            if not base_value.consumers and isinstance(base_value.source, Kept):
                self.log.keep(base_value, base)  # the view is computed from it
        saved = Saved(value, self.memories, tensor)
        serves = row.result_serves is not None and row.result_serves(call.args, call.kwargs)
        if serves and (self.by_plan or isinstance(value.source, Recipe)):
            call.replaceable.append(saved)
        elif row.positive is not None and value.positive in (None, row.positive):
            saved.reads_signs = True
            value.positive = row.positive
            value.stream = current_stream(tensor)
            value.sign_consumers += 1
            self.signs.append(weakref.ref(value))
        return saved

    def _keep_with_base(self, tensor: Tensor, call: Call) -> Value:
        """Keep a tensor; if it is a view of its whole base, keep the base, so that other views can be made from it."""
        base = tensor._base
        is_base = base is not None and base.numel() == tensor.numel() and self.is_made(base)
        kept = base if base is not None and is_base else tensor
        value = self.keep(kept)
        value.why = value.why or self.log.why(tensor)
        self.log.keep(value, kept)
        if call.row.inside:
            call.inside.append(Inside(value, call.saves - 1, is_base))
        if not is_base:
            return value
        view_value = self.value_of(tensor)
        if view_value is None:  # a view that cannot be made again, such as a conjugate
            view_value = self.keep(tensor)
            self.log.keep(view_value, tensor)
        return view_value

    def settle_gone(self) -> None:
        """Forget tensors that have been freed. If a consumer needs only their signs, `settle` their values."""
        while self.dead:
            reference = self.dead.pop()
            last_reference, _, value = self.value_by_id.get(reference.event, NOT_KNOWN)
            if last_reference is reference:
                del self.value_by_id[reference.event]
                if value.sign_consumers:
                    self.gone.append(value)
        if self.gone:
            self.gone = [value for value in self.gone if not value.settle(self.outer)]

    def note_made(self, arguments: Sequence[Any], result: object, maker: Any = True) -> None:
        """Note the memory of a call's results without a gradient, e.g. masks. `maker`: its site, if it has one."""
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if not isinstance(tensor, Tensor) or tensor.requires_grad or not tensor.dim() or not is_ordinary(tensor):
                continue  # single numbers, such as counts of minibatches, are copied anyway
            storage = tensor.untyped_storage()
            if not self.without_gradient.get(storage):
                inputs = filter(is_ordinary, tensors_in(arguments))
                shared = [tensor for tensor in inputs if address(tensor.untyped_storage()) == address(storage)]
                if all([self.is_made(tensor) for tensor in shared]):
                    self.without_gradient.put(storage, maker)

    def has_made(self, tensor: Tensor) -> bool:
        """Whether a tensor is in memory noted by `note_made`, and not shared with NumPy or the like."""
        storage = tensor.untyped_storage()
        maker = self.without_gradient.get(storage)
        if maker is None or not storage.resizable():
            return False
        if maker is not True:
            maker.advice |= MEMORY
        return True


def is_parameter(tensor: Tensor) -> bool:
    """Whether a tensor is a parameter, or a view of one, as FSDP1's gathered parameters are."""
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)


def checkpointed_output(node: Any, x: Tensor | None, vectors: Sequence[Any], exposed: ByStorage[bool]) -> Tensor:
    """The output of a checkpointed norm.

    `x`: its argument; None if hooks of the program have packed it. `vectors`: what else the node has saved.
    `exposed`: of the pass. If it is not empty, the node may read another argument.
    """
    if x is not None and (exposed.by_address or not packed_by_function(node)):  # a backward pass has freed them
        return recompute_output(node, [x, *[vector.get() for vector in vectors]])
    return recompute_output(node)
