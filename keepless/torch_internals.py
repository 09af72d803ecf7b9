"""All private parts of PyTorch and Triton that keepless uses. The training has others: `models/private_torch.py`.

Tested with torch 2.11.0 and 2.14.1, each with its own Triton. If a part is missing:

| part | used for | if it is missing |
|---|---|---|
| `_raw_saved_*`, `_saved_*` of nodes, `data` of a `SavedTensor` | what hooks packed, dropout's p | the result is kept |
| `torch._dynamo.comptime` | a warning at compilation | ImportError while compiling |
| `torch._inductor.compile` | whether there is a compiler | the eager backend is used |
| what `getattr`, `hasattr` ask for | profilers, `nn.SyncBatchNorm`'s node | they go unnoticed |
| everything else in the `try` below | | ImportError when this package is imported |
| what only a function's body names | e.g. FSDP2's dtype, CUDA graphs | AttributeError or ImportError in a call |

Other files use only private parts on which PyTorch's extensions rely: `Tensor._version`, `_base` and `_is_view`, and in
`nn.Module` the dictionaries (`_parameters`, `_buffers`, `_modules`, `_forward_hooks`, …), the set
`_non_persistent_buffers_set`, `_load_from_state_dict` and `_save_to_state_dict`.
"""

import gc
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from functools import cache, partial
from operator import attrgetter, methodcaller
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.nn.attention import SDPBackend

from .version import __version__

Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]

try:
    from torch._ops import OpOverload, OpOverloadPacket  # the types of operators in `torch.ops`
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensor,
        FakeTensorMode,
    )
    from torch.nn.attention import _backend_names
    from torch.nn.modules._functions import SyncBatchNorm
    from torch.nn.modules.batchnorm import _BatchNorm as BatchNormBase
    from torch.nn.modules.batchnorm import _NormBase as NormBase
    from torch.nn.modules.instancenorm import _InstanceNorm as InstanceNormBase
    from torch.nn.utils import parametrize as _parametrize
    from torch.overrides import _get_current_function_mode as current_function_mode
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._python_dispatch import _disable_current_modes as with_dispatch_modes_off
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as dispatch_modes
    from torch.utils._python_dispatch import _pop_mode as pop_dispatch_mode
    from torch.utils._python_dispatch import _push_mode as push_dispatch_mode
    from torch.utils._pytree import register_pytree_node, tree_flatten, tree_leaves, tree_map, tree_unflatten

    _attention_order: Callable[[], list[int]] = torch._C._get_sdp_priority_order
    _attention_enabled = {
        int(getattr(SDPBackend, backend)): getattr(torch._C, f"_get_{name}_sdp_enabled")
        for name, backend in _backend_names.items()
    }
    # Whether a tensor has a storage; sparse and batched ones have none.
    has_storage: Callable[[Tensor], bool] = torch._C._has_storage
    # How many objects of C++ and Python hold a storage, by its address.
    storage_uses: Callable[[int], int] = torch._C._storage_Use_Count
    # Per thread. PyTorch's is_in_torch_dispatch_mode is global, and may stay True where modes of threads overlap.
    dispatch_modes_on: Callable[[], int] = torch._C._len_torch_dispatch_stack
    function_modes_on: Callable[[], int] = torch._C._len_torch_function_stack
    _dispatch_mode = torch._C._get_dispatch_stack_at
    _function_mode = torch._C._get_function_stack_at
    without_function_modes = torch._C.DisableTorchFunction
    without_subclasses = torch._C.DisableTorchFunctionSubclass
    # Whether `__torch_function__` of tensor subclasses is enabled.
    subclasses_are_asked: Callable[[], bool] = torch._C._is_torch_function_enabled
    without_dispatch_modes = torch._C._DisableTorchDispatch
    # RuntimeError with a message if a tensor () is 0. On CUDA nothing waits for it: a later call raises the error.
    assert_on_device: Callable[[Tensor, str], None] = torch._assert_async
    # The level of functorch's transforms, such as `torch.vmap`, where functions see wrapped tensors; None outside.
    transform_level: Callable[[], int | None] = torch._C._functorch.maybe_current_level
    _is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    _unwrapped = torch._C._functorch.get_unwrapped
    # Whether autocast is enabled for any type of device.
    is_any_autocast_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled
    # Autograd numbers each thread's nodes in the order in which they are made.
    next_node_number: Callable[[], int] = torch.autograd._get_sequence_nr
    # Whether the running backward pass keeps its graph (retain_graph=True).
    keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
    # Call a function when the running backward pass ends.
    at_end_of_backward: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback
    # The number of the running backward pass; -1 outside of one.
    backward_number: Callable[[], int] = torch._C._current_graph_task_id
    _disabled_message = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message
    _hooks_of_torch = torch._C._autograd
    _disable_hooks = _hooks_of_torch._saved_tensors_hooks_disable
    _enable_hooks = _hooks_of_torch._saved_tensors_hooks_enable
    _dynamo = torch._C._dynamo.eval_frame
    _set_strategy = _dynamo.set_code_exec_strategy
    _skip = _dynamo._FrameAction.SKIP
    _SKIPPED = _dynamo._FrameExecStrategy(_skip, _skip)  # a function, and what it calls
    # Set and remove saved-tensor hooks: pack and unpack.
    push_hooks: Callable[..., None] = _hooks_of_torch._push_saved_tensors_default_hooks
    pop_hooks: Callable[[], None] = _hooks_of_torch._pop_saved_tensors_default_hooks
    _innermost_hooks = _hooks_of_torch._top_saved_tensors_default_hooks
    Tensor._version, Tensor._base, Tensor._is_view, torch.UntypedStorage._cdata, _parametrize._cache  # noqa: B018
except (ImportError, AttributeError) as error:
    raise ImportError(
        f"keepless {__version__} does not support torch {torch.__version__} ({error}): update keepless, or install a "
        f"tested version of torch, such as 2.14"
    ) from error

# The address of a storage's C++ object, which identifies the storage while it exists.
address: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")

# The errors of fake tensors if a program asks for their values.
ASKS_FOR_VALUES = DataDependentOutputException, DynamicOutputShapeException

_INNER = frozenset(["keepless", "torch", "contextlib"])  # packages whose lines are skipped in warnings

# PyTorch's modes that replace functions by others, which round differently
_CHANGE_RESULTS = frozenset(["TorchRefsMode", "ComplexTensorMode", "WrapComplexMode", "OpCheckMode", "CrossRefMode"])
_OBSERVERS = (
    *("torch.utils.module_tracker", "torch.utils._debug_mode", "torch.autograd.graph"),
    *("torch.distributed._tools.", "torch.distributed.tensor.debug."),
)
_MODULE_CALL = nn.Module.__call__.__code__
# The class of the nodes of `nn.SyncBatchNorm`, which save input, weight, mean, inverse deviation and count.
SYNCHRONISED = getattr(SyncBatchNorm, "_backward_cls", None)


class KeeplessWarning(UserWarning):
    """A warning of this package, such as of a step that may exceed its budget.

    `warnings.simplefilter("error", keepless.KeeplessWarning)` raises it where it is said, which may be inside a step.
    """


def warn(message: str) -> None:
    """Warn at the line that called this package, perhaps through PyTorch's modules."""
    level = 2
    frame = sys._getframe(1)
    while frame.f_back is not None and (frame.f_globals.get("__name__") or "").split(".")[0] in _INNER:
        level += 1
        frame = frame.f_back
    warnings.warn(message, KeeplessWarning, stacklevel=level)


def changing_mode() -> type | None:
    """The class of the innermost mode around that may change what functions compute; None if there is none.

    PyTorch's own modes count operators, make tensors fake or choose devices. Only a few of them change results.
    """
    stacks = (_function_mode, function_modes_on), (_dispatch_mode, dispatch_modes_on)
    modes = [type(mode(number)) for mode, count in stacks for number in range(count())]
    return next((mode for mode in reversed(modes) if not _keeps_results(mode)), None)


def _keeps_results(mode: type) -> bool:
    is_observer = mode.__module__.split(".")[0] in ("torch", "keepless") and mode.__name__ not in _CHANGE_RESULTS
    return is_observer or issubclass(mode, FakeTensorMode)  # which computes no values


def is_observed() -> bool:
    """Whether hooks of PyTorch's observers, such as `FlopCounterMode`'s, make the running call."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _MODULE_CALL:
        if (frame.f_globals.get("__name__") or "").startswith(_OBSERVERS):
            return True
        frame = frame.f_back
    return False


@contextmanager
def without_cached_weights() -> Iterator[None]:
    """Context in which modules find no weights of `parametrize.cached`.

    PyTorch keys this cache by id(module); a copied module may be given another's weight, as ids are reused.
    """
    previous_cache = _parametrize._cache
    _parametrize._cache = {}
    try:
        yield
    finally:
        _parametrize._cache = previous_cache


def argument_copied_by(node: Any, arguments: Iterable[Any]) -> Tensor | None:
    """The argument of a call that a node has copied, perhaps cast, expanded or reshaped; None if there is none."""
    if type(node).__name__ == "UnsafeViewBackward0":  # of a copy
        node = node.next_functions[0][0]
    if type(node).__name__ not in ("ToCopyBackward0", "CloneBackward0"):
        return None
    source, number = node.next_functions[0]
    if type(source).__name__ == "ExpandBackward0":
        source, number = source.next_functions[0]
    leaf = getattr(source, "variable", None)
    for argument in arguments:
        if isinstance(argument, Tensor):
            if argument is leaf or (argument.grad_fn is source and argument.output_nr == number):
                return argument
    return None


def calling_module() -> "weakref.ref[nn.Module] | None":
    """The innermost module whose forward pass runs now; None outside of modules."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _MODULE_CALL:
        frame = frame.f_back
    return None if frame is None else weakref.ref(frame.f_locals["self"])


post_accumulate_hooks: Callable[[Tensor], Any] = attrgetter("_post_accumulate_grad_hooks")  # of a parameter, if any


def ddp_around() -> Any:
    """The DistributedDataParallel whose forward pass is running; None if there is none."""
    return nn.parallel.DistributedDataParallel._active_ddp_module


def backward_runs() -> bool:
    """Whether a backward pass is running."""
    return backward_number() != -1


def profiler_runs() -> bool:
    """Whether a profiler of PyTorch records, warms up or waits, in any thread."""
    profiler = torch.autograd.profiler
    steps = getattr(getattr(profiler, "KinetoStepTracker", None), "_step_dict", ())
    return getattr(profiler, "_is_profiler_enabled", False) or "ProfilerStep" in steps


# Whether the steps of this thread are to be captured later: see `before_capture`.
awaits_capture = ContextVar("awaits_capture", default=False)


@contextmanager
def before_capture() -> Iterator[None]:
    """Context of steps before a capture. Plans made in it keep random masks, as a CUDA graph cannot draw them again."""
    token = awaits_capture.set(True)
    try:
        yield
    finally:
        awaits_capture.reset(token)


def is_capturing() -> bool:
    """Whether a CUDA graph is being captured on the current stream: the host must not wait for the device."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def attention_backends() -> list[int]:
    """The numbers of the enabled attention backends (`SDPBackend`), by priority; faster than PyTorch's function."""
    return [backend for backend in _attention_order() if _attention_enabled[backend]()]


def is_transformed(arguments: Any) -> bool:
    """Whether `torch.fx` traces a call with these arguments, or `torch.autograd.functional` runs it in its `vmap`."""
    torch._C._vmapmode_increment_nesting()
    is_mapped = torch._C._vmapmode_decrement_nesting() > 0
    return is_mapped or any(isinstance(leaf, fx.Proxy) for leaf in tree_leaves(arguments))


def unwrapped(tensor: Tensor) -> Tensor:
    """The tensor inside functorch's wrappers; the tensor itself if it is not wrapped."""
    while _is_wrapped(tensor):
        tensor = _unwrapped(tensor)
    return tensor


def node_of(tensor: Tensor) -> Any:
    """The node that has made a tensor. None: a leaf, or a view made under no_grad whose base was written over since."""
    try:
        return tensor.grad_fn
    except RuntimeError:  # PyTorch forbids to differentiate such a view, but not to have it
        return None


# The number of a node: see `next_node_number`.
node_number: Callable[[Any], int] = methodcaller("_sequence_nr")


def unpack(packed: Any) -> Tensor:
    """The unpack hook for objects with a method `get`, which `packed_by` can find."""
    return packed.get()


# PyTorch's compiled autograd does not trace it, nor what it calls. A decorator would take longer than the call.
_set_strategy(unpack.__code__, _SKIPPED)
unpack._torchdynamo_disable = True  # type: ignore[attr-defined]


def packed_by(node: Any, name: str) -> Any:
    """The packed object that PyTorch's node holds for the saved tensor with this name; None if there is none."""
    try:
        return _packed_getter(name)(node)
    except AttributeError:
        return None


@cache
def _packed_getter(name: str) -> Callable[[Any], Any]:
    return attrgetter(f"_raw_saved_{name}.data")


@cache
def _saved_names(kind: type) -> list[str]:
    """The names under which PyTorch's nodes of a class save tensors, and lists of tensors."""
    prefix = "_raw_saved_"
    return [name.removeprefix(prefix) for name in dir(kind) if name.startswith(prefix) and name != f"{prefix}tensors"]


def single_tensors_packed_by(node: Any) -> tuple[Any, ...]:
    """What a node of PyTorch's holds for its single tensors: what hooks have packed, or the tensors themselves."""
    kind: Any = type(node)
    try:
        return _single_tensors_getter(kind)(node)
    except (AttributeError, RuntimeError):  # a list of tensors
        return ()


@cache
def _single_tensors_getter(kind: type) -> Callable[[Any], tuple[Any, ...]]:
    names = _saved_names(kind)
    if not names:
        return lambda node: ()
    getter = attrgetter(*[f"_raw_saved_{name}.data" for name in names])
    return getter if len(names) > 1 else lambda node: (getter(node),)


def packed_by_function(node: Any) -> tuple[Any, ...]:
    """What a custom function's node holds, packed; None for absent tensors. Empty once a backward pass has freed it."""
    with suppress(RuntimeError):
        return tuple(getattr(saved, "data", None) for saved in getattr(node, "_raw_saved_tensors", ()))
    return ()


def all_packed_by(node: Any) -> list[Any]:
    """What hooks have packed of a node's single tensors, also beside lists; none once a backward pass has freed it."""
    kind: Any = type(node)
    with suppress(RuntimeError):
        return [*packed_by_function(node), *[packed_by(node, name) for name in _saved_names(kind)]]
    return []


def dropped_share(node: Any) -> float | None:
    """The probability p of a dropout node; None if it is unknown."""
    return getattr(node, "_saved_p", None)


def declared_results(overload: OpOverload) -> list[Any]:
    """The results in an operator's schema."""
    return list(overload._schema.returns)


def written_arguments(operator: OpOverload) -> list[tuple[int, str]]:
    """Positions and names of the arguments that an operator writes over."""
    return [
        (position, argument.name)
        for position, argument in enumerate(operator._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def gathered_dtype(module: Any) -> torch.dtype | None:
    """The dtype in which FSDP2 gathers the parameters of a module that it has sharded; None: their own."""
    return module._get_fsdp_state()._mp_policy.param_dtype


def simulated_collective(operator: OpOverload, args: tuple[Any, ...]) -> Any:
    """The result of a collective operator, as if all other processes had the same tensors. Nothing is sent.

    RuntimeError for others than reductions over all, gathering by all, broadcasts and barriers.
    """
    from torch._C._distributed_c10d import FakeWork

    finished_work = FakeWork().boxed()
    name = operator.overloadpacket.__name__
    if name == "_allgather_base_":
        args[0].view(-1, *args[1].shape).copy_(args[1])
    elif name == "allgather_":
        for outputs, tensor in zip(args[0], args[1], strict=True):
            for output in outputs:
                output.copy_(tensor)
    elif name == "barrier":
        return finished_work
    elif name not in ("allreduce_", "broadcast_"):
        raise RuntimeError(f"{operator} communicates with other processes: it cannot be rehearsed in one process")
    return args[0], finished_work


def forget_originals(mode: FakeTensorMode) -> None:
    """Let a mode, which may be freed late, refer no more to the tensors of which it has made fake ones."""
    mode.fake_tensor_converter.meta_converter.describer.lookup_tensor.clear()


def node_class(function: type[torch.autograd.Function]) -> type:
    """The class of the nodes that an autograd function makes."""
    return function._backward_cls


def hooks_are_allowed() -> bool:
    """Whether saved-tensor hooks may be set; `torch.func.grad` and `disable_saved_tensors_hooks` forbid it."""
    return _disabled_message() is None


_set_aside = threading.local()  # its `hooks`: of a recording, while `disable_saved_tensors_hooks` is in effect


def set_aside_while_disabled(is_ours: Callable[[Hooks], bool]) -> None:
    """Let `disable_saved_tensors_hooks` set our hooks aside, in this thread. With any hooks it raises an error.

    It is called inside forward passes, by programs and by `torch.func.grad`. Function modes do not see it.
    """

    def disable(message: str, fail_if_non_empty: bool = True) -> None:
        hooks = current_hooks()
        if hooks is not None and is_ours(hooks):
            pop_hooks()
            _set_aside.hooks = hooks
        _disable_hooks(message, fail_if_non_empty)  # an error if others are around ours; then `enable` follows, too

    def enable() -> None:
        _enable_hooks()
        hooks: Hooks | None = vars(_set_aside).pop("hooks", None)
        if hooks is not None:
            push_hooks(*hooks)

    _hooks_of_torch._saved_tensors_hooks_disable = disable
    _hooks_of_torch._saved_tensors_hooks_enable = enable


# The saved-tensor hooks in effect now, e.g. from `torch.autograd.graph.save_on_cpu`; None if there are none.
current_hooks: Callable[[], Hooks | None] = partial(_innermost_hooks, False)


def is_compiled(module: object) -> bool:
    """Whether a module was returned by `torch.compile`, or compiled in place by its `compile`, or its `forward` was."""
    kind = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", ())
    forward = getattr(module, "forward", None)
    is_inside = hasattr(forward, "_torchdynamo_orig_callable") and not hasattr(forward, "_torchdynamo_disable")
    return isinstance(module, kind) or getattr(module, "_compiled_call_impl", None) is not None or is_inside


def call_at_compilation(function: Callable[[object], None]) -> None:
    """Inside `torch.compile`: call a function while the graph is traced."""
    from torch._dynamo.comptime import comptime  # the import takes a second

    comptime(function)


def compile_by_inductor(graph: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
    """Compile a graph without Dynamo. RuntimeError, OSError or AttributeError if that is impossible."""
    return torch._inductor.compile(graph, [*inputs])


def triton_is_interpreted() -> bool:
    """Whether Triton runs its kernels in its interpreter, on CPU tensors."""
    import triton

    return bool(triton.knobs.runtime.interpret)


# For counting the memory of a step


def running_node() -> Any:
    """The node whose gradients the running backward pass computes; None outside of one."""
    return torch._C._current_autograd_node()


def engine_adds() -> bool:
    """In the `__torch_dispatch__` of an addition: whether autograd's engine or a C++ node is adding gradients."""
    frame = sys._getframe(1)
    while frame is not None and (
        frame.f_code.co_name == "__torch_dispatch__"
        or frame.f_globals.get("__name__", "").startswith(("torch._compile", "torch._dynamo", "torch.utils."))
    ):
        frame = frame.f_back  # type: ignore[assignment]
    return backward_runs() and (frame is None or frame.f_code.co_name == "_engine_run_backward")


@contextmanager
def without_collection() -> Iterator[None]:
    """Context in which Python's garbage collector does not run by itself."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
