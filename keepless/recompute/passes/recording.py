"""Record a forward pass so that autograd keeps few of its tensors, and the backward pass recomputes the others.

A tensor is *kept* if it stays in memory until the backward pass. It is *dropped* if a recipe computes it: then it
exists only in a backward pass, between its first consumer and its last.

Rule 1. A recording is a function mode with saved-tensor hooks: it sees every outermost call of a function, and every
    tensor that autograd saves, mostly during a call, before it is known whether that can be repeated. If a function
    written in Python has no rule, the recording sees the calls inside it instead.
Rule 2. In place of a tensor, autograd holds a `Saved`, which refers to a `Value` (held/values.py): the tensor itself
    (`Kept`), or a `Recipe`, which is a function of other values. Operations that save the same tensor share its value.
Rule 3. A saved tensor is kept at first. If its call has a rule (functions.py) whose inputs are available (recipes.py),
    its value becomes a recipe and the tensor is dropped.
Rule 4. A recipe reads values that are kept anyway, and parameters of the network, frozen or not, which stay. It may
    also keep alive other leaves with a gradient, arguments that are `MUCH` times smaller than its result, and arguments
    for which its rule says may_keep=True. Other tensors without a gradient are copied, unless the pass has made them.
Rule 5. Apart from leaves, the bytes kept only for a recipe never exceed the bytes of its result: the parts of a
    concatenation are not kept just to recompute their mean. Nor is a result recomputed that is over `MUCH` times
    smaller than the kept tensors that this would read: the mean of an activation is kept itself.
Rule 6. If no gradient needs an input's values (the convolution or eval-mode norm that reads it is frozen), only its
    shape and strides are kept (`TensorSpec`). A value that only ReLU and LeakyReLU read shrinks to one bit per entry
    (`Signs`) once its tensor, and the tensors of recipes that read it, are freed, at the latest as the pass ends.
Rule 7. A value is computed for its first consumer in a backward pass, and held until the last one has read it or the
    pass has ended. Another backward pass over the graph computes it again.
Rule 8. A chain has at most `LONGEST` recipes, in a plan `LONGEST_PLANNED`; views and casts may lengthen it a little.
Rule 9. A value belongs to one version of a tensor. Before a call that may overwrite memory, the values and parameters
    in it that recipes read are copied. Afterwards, reading a tensor saved from that memory raises PyTorch's error about
    in-place operations. So does reading a kept tensor or parameter that was modified later, or without our seeing it.
    If the program reads or sets `.data` of a tensor that the pass has made, or gets it as an array, its memory is saved
    as in PyTorch, recipes that have read it get copies, and no other one reads it (`Registry.expose`).
Rule 10. The hooks around a recording, such as `save_on_cpu`, get a tensor only when it is certain to stay kept.
Rule 11. The recording ends with the forward pass, or if that was interrupted (Ctrl-C), at the next recorded call. No
    generator is left before its end while a pass is recorded (`all([…])`, not `all(…)`): Python would swallow a Ctrl-C
    while it frees that generator.
Rule 12. Gradients never differ from autograd's. Random functions are repeated only with the same random numbers (in a
    plan; otherwise dropout keeps its mask). Running statistics are not updated twice. Tensors without versions are kept
    as they are. Inside other saved-tensor hooks, such as a checkpoint's, in functorch's transforms, and under modes of
    the program, which may change what functions compute, no call is recorded. When in doubt, keep the tensor.
Rule 13. Either these rules decide what is kept, or a plan does, call by call. A plan's recipes may read any tensor that
    the forward pass has made (`decide_by_plan` in recipes.py).
Rule 14. Every pass is recorded by these rules, from its own tensors and arguments. What earlier passes have taught is
    advice (advice.py): what is worth doing about the calls at a place in the program. In later passes (advised.py) most
    calls run as they are, some get hooks around them, and those whose results are dropped get the recipe that their
    rule makes of the present arguments. So the slow questions, what to keep for a recipe and whether that pays, are
    asked once, and again only about calls that are new.
Rule 15. At its end a pass is compared with the first one of its advice: the nodes that autograd has made, without those
    of missing calls; calls that cut the graph, such as `detach`; the bytes of results of calls that save tensors, if
    there is a budget; and calls that other hooks or modes had hidden. If it has made more, the next pass is recorded
    anew, and watched within a budget. So may be a pass within a budget of which over a quarter of the calls are new.
    Within a budget, bytes of results are also compared call by call: once they are larger than planned, what the rest
    of the pass saves is held elsewhere (`hold_elsewhere`).

What is taken for granted, and not compared:
- the table's row of a function, which is found by its identity: what its rule repeats, and whether it may write;
- that a value is found by the identity and version of its tensor. Writes that change no version are seen where the
  program gets or sets `.data`, or gets an array. Those of code in C++ are not, nor is `.data` of a parameter between
  the forward and the backward pass (rule 9);
- that PyTorch's own modes, of which it has a list (`changing_mode`), change no results;
- in the first pass of its advice, that a plan was made from a step (step/watch.py) on inputs of this kind.

An example, and what autograd holds for each tensor:

    x = F.conv2d(images, weight)              # the norm saves x: kept, as only a plan repeats a convolution
    y = F.batch_norm(x, …, training=True)     # the activation saves y: a recipe from x and the norm's saved statistics
    z = F.silu(y)                             # the next convolution saves z: a recipe from y, so computed from x
    out = F.conv2d(z, weight2)                # nothing here saves it: freed when the program drops it

In step 1 the rule of `F.batch_norm` gives y's value a recipe, and y is freed with the program's last name for it. In
the backward pass, the second convolution asks `Saved.get` for z, whose recipe reads y: `Value.get` computes y, and
holds it for SiLU, its other consumer. At the end of step 1 the recipes have consumers, so the advice is "drop the
norm's result", and "set hooks around SiLU, and drop its result". In step 5 the norm's rule makes y's recipe from this
step's tensors, and `Advised.pack` finds y's value by y's id and version as SiLU saves it.
"""

from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from ...inputs import tensors_in
from ...saved import PLAIN, Kept, adds_metadata, is_ordinary
from ...torch_internals import (
    Hooks,
    changing_mode,
    current_function_mode,
    current_hooks,
    dispatch_modes_on,
    pop_hooks,
    push_hooks,
    set_aside_while_disabled,
    subclasses_are_asked,
    transform_level,
    unpack,
    unwrapped,
)
from ..held.calls import Call, Overwriting, begin_overwriting, end_overwriting
from ..held.elsewhere import Elsewhere
from ..table.functions import EXPOSE, Row, body, row_of
from ..table.rules import Rule
from ..table.writes import may_overwrite, overwritten
from .finder import derive_value
from .packing import pack
from .plan import ByPlan
from .recipes import decide_by_plan, drop_foreign_parts, give_recipe, may_drop, note_random, prepare_to_repeat
from .registry import Registry
from .report import KeptTensor

SETS_DATA: Any = Tensor.data.__set__  # type: ignore[attr-defined]
_MEETING = 3  # tensors of the largest result's size that meet in its backward pass, beside what is saved
RUN_AGAIN: list[type[nn.Module]] = []  # classes whose children run again by themselves: each is recorded alone


class Recording(TorchFunctionMode):
    """Context of a forward pass in which autograd saves `Value`s instead of tensors: see the top of this file.

    Args:
        policy: decides what is kept; None: everything that no rule can recompute from what is kept anyway.
        sees_calls: False: recipes come only from autograd's nodes, as for the outputs of `CheckpointedABN`.
        copy_parameters: copy the parameters that recipes read, because FSDP frees gathered parameters after each use.
        inputs: the network's inputs. They are kept, because they may be other tensors when a checkpoint around the
            network repeats the forward pass.
        frame: the frame of the call that leaves this context, unless Ctrl-C ends it.
        kept_limit_bytes: what is kept beyond so many bytes is held elsewhere. None: nothing is.
        registry: of the pass, in place of the one that these arguments make.
    """

    def __init__(
        self,
        policy: ByPlan | None = None,
        *,
        sees_calls: bool = True,
        copy_parameters: bool = False,
        inputs: Sequence[Tensor] = (),
        frame: FrameType | None = None,
        kept_limit_bytes: int | None = None,
        registry: Registry | None = None,
    ):
        super().__init__()
        outer = current_hooks() if kept_limit_bytes is None else Elsewhere(kept_limit_bytes).hooks
        self.registry = registry or Registry(inputs, outer, copy_parameters, policy is not None)
        self.policy = policy
        self.sees_calls = sees_calls
        self.frame = frame
        self.is_mode = True  # whether it is entered as a function mode, to see calls
        self.is_abandoned = False
        self.hooks: saved_tensors_hooks | None = None
        self.outer_hooks: list[Hooks] = []  # set around ours, innermost first
        self.kept: Sequence[KeptTensor] = ()  # at the end
        self.signature: Any = None  # of the inputs
        self.dispatch_mode_count = 0  # of modes around
        self.changing_mode: type | None = None  # a mode around that may change what calls compute
        self.elsewhere: Elsewhere | None = None  # where the rest of the pass holds what it saves
        self.excess_bytes = 0  # bytes by which it may take more than planned
        self.fluctuation_bytes = 0  # bytes of its results beyond those planned, when it began to hold them elsewhere

    def __enter__(self) -> "Recording":
        self.dispatch_mode_count = dispatch_modes_on()
        self.changing_mode = changing_mode()
        self.start_hooks()
        self.is_mode = self.sees_calls or bool(self.outer_hooks)  # outer hooks: for the first call after Ctrl-C
        if self.is_mode:
            super().__enter__()
        return self

    def pack_hook(self) -> Callable[[Tensor], object]:
        """The hook that packs what autograd saves."""
        return partial(pack, self.registry)

    def start_hooks(self) -> None:
        self.outer_hooks = hooks_around()
        self.hooks = saved_tensors_hooks(self.pack_hook() if self.sees_calls else self._pack_unless_abandoned, unpack)
        self.hooks.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self.is_mode:
            super().__exit__(*error)
        self._end_hooks()
        self.forget(has_raised=error[0] is not None)

    def _end_hooks(self) -> None:
        if self.hooks is not None:
            self.hooks.__exit__()
            self.hooks = None  # they refer to this recording

    def forget(self, has_raised: bool) -> None:
        """Release the recording's tensors; autograd holds the ones it needs."""
        self.registry.clear(has_raised)
        self.kept = self.registry.log.take_kept_tensors(None if self.policy is None else self.policy.why_kept)
        self.frame = None

    def end_if_abandoned(self) -> bool:
        """End the recording if its pass has ended without leaving this context: modules call no hooks after Ctrl-C.

        Returns whether it has.
        """
        if clear_if_ended(self.frame):
            self.is_abandoned = True  # first, because this mode sees the functions that `forget` calls
            self.frame = None
            self.forget(has_raised=True)
        if self.is_abandoned and self.hooks is not None:
            hooks = current_hooks()
            # Contexts around, such as checkpoints, may have removed our hooks first, and so left one of theirs.
            is_left = hooks is not None and any([hooks[0] is pack for pack, _ in self.outer_hooks])
            if is_left or self.is_innermost():
                self._end_hooks()
        return self.is_abandoned

    def leave_abandoned(self) -> bool:
        """Remove the rest of an abandoned recording; False if another context has been entered on top of it."""
        is_covered = self.is_mode and current_function_mode() is not self
        if not self.end_if_abandoned() or self.hooks is not None or is_covered:
            return False
        if self.is_mode:
            super().__exit__(None, None, None)
        return True

    def is_innermost(self) -> bool:
        """Whether our saved-tensor hooks are innermost, i.e. no others, such as a checkpoint's, were set inside."""
        hooks = current_hooks()
        return hooks is not None and self.hooks is not None and hooks[0] is self.hooks.pack_hook

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if torch.compiler.is_compiling():
            return function(*args, **(kwargs or {}))
        return self.see(function, types, args, kwargs or {})

    def see(self, function: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call that this mode sees; record it, or the calls inside it."""
        if not self.sees_calls:
            self.end_if_abandoned()
            return function(*args, **kwargs)
        row = row_of(function)
        are_plain = PLAIN.issuperset(types)
        if (row.only_asks and are_plain) or self.end_if_abandoned():
            return function(*args, **kwargs)
        if not are_plain and subclasses_are_asked() and any(map(adds_metadata, types)):
            return self._see_inside(partial(_dispatch, types), function, args, kwargs)
        if row.is_opened and are_plain:
            return self._see_inside(body(function), *args, **kwargs)
        return self.record(function, row, are_plain, args, kwargs)

    def record(self, function: Any, row: Row, are_plain: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.run_by_rules(Call(function, row, args, kwargs))

    def run_by_rules(self, call: Call) -> Any:
        """Run a call, and let the rules decide about it."""
        self.registry.settle_freed()
        if call.function in EXPOSE:
            if is_ordinary(call.args[0]):
                self.registry.expose(call.args[0])
            return call.function(*call.args, **call.kwargs)
        if call.function == SETS_DATA and is_ordinary(call.args[0]):
            self.registry.prepare_setting_data(*call.args)
        if not may_overwrite(call.function, call.args, call.kwargs):
            return self.run(call)
        call.overwrites = True
        writes = self.begin_writing(call.function, call.args, call.kwargs)
        try:
            return self.run(call)
        finally:
            self.end_writing(writes)

    def begin_writing(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Overwriting]:
        """Before a call that may write over tensors: copy what recipes read from their memory."""
        registry = self.registry
        registry.storages.note_unnoted()
        tensors = [unwrapped(tensor) for tensor in overwritten(function, args, kwargs)]
        writes = [
            begin_overwriting(tensor, registry.storages.memories, registry.outer)
            for tensor in tensors
            if not registry.storages.may_change_unseen(tensor)  # no recipe reads it
        ]
        return [write for write in writes if write is not None]

    def end_writing(self, writes: list[Overwriting]) -> None:
        for write in writes:
            if end_overwriting(write, self.registry.storages.memories):
                self.registry.forget_values(write.storage)

    def _see_inside(self, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Run a function, and see the ones that it calls."""
        super().__enter__()
        try:
            return function(*args, **kwargs)
        finally:
            super().__exit__(None, None, None)

    def run(self, call: Call) -> Any:
        """Run a call, and find out whether its result can be recomputed."""
        registry = self.registry
        rule = call.row.again if registry.by_plan or not call.row.is_slow else None
        mode = self.changing_mode if dispatch_modes_on() == self.dispatch_mode_count else changing_mode()
        # Other hooks inside ours may be a checkpoint's.
        is_hidden = transform_level() is not None or mode is not None or not self.is_innermost()
        if is_hidden or not torch.is_grad_enabled():
            return self._run_unrecorded(call, rule, mode)
        if call.overwrites and call.args and isinstance(call.args[0], Tensor) and is_ordinary(call.args[0]):
            call.version = call.args[0]._version
            call.before = derive_value(registry, call.args[0])
        registry.log.function = call.function
        if registry.by_plan:
            note_random(call)
        registry.call = call
        try:
            result = call.function(*call.args, **call.kwargs)
            self._conclude_call(call, rule, result)
        finally:
            registry.call = registry.log.function = None
        return result

    def _run_unrecorded(self, call: Call, rule: Rule | None, mode: type | None) -> Any:
        """Run a call that makes no graph, or that is hidden by a transform, by a mode of the program, or by hooks.

        `rule`: the one that would repeat it, if any. `mode`: the program's.
        """
        needs_grad = torch.is_grad_enabled()  # asked before the call, which may switch gradients
        is_wrapped = transform_level() is not None
        result = call.function(*call.args, **call.kwargs)
        self.registry.storages.note_made(call.arguments, result, call.site or True)
        if mode is not None:
            self._keep_unless_known(result)
            if rule is not None:
                self._note_refused(mode, rule, call, result)
        elif needs_grad:
            hooks = "a checkpoint, reversible blocks or saved-tensor hooks of its own"
            self.registry.unseen = "torch.vmap" if is_wrapped else hooks
        self.note_conclusion(call, result, is_hidden=needs_grad)
        return result

    def note_conclusion(self, call: Call, result: Any, is_hidden: bool = False) -> None:
        """A call has run, and the rules have decided about it, unless it was hidden."""

    def _keep_unless_known(self, result: Any) -> None:
        """Keep the tensors in a call's result that the pass has made and that have no values yet."""
        registry = self.registry
        for tensor in tensors_in(result):
            if registry.storages.is_made(tensor) and registry.find_value(tensor) is None:
                registry.keep(tensor)

    def _note_refused(self, mode: type, rule: Rule, call: Call, result: Any) -> None:
        """Note the first mode under which a call has run whose result would have got a recipe otherwise."""
        registry = self.registry
        if registry.refused_mode is not None or not isinstance(result, Tensor):
            return
        if registry.storages.is_made(result) and prepare_to_repeat(registry, rule, call, result) is not None:
            registry.refused_mode = mode

    def _conclude_call(self, call: Call, rule: Rule | None, result: Any) -> None:
        """Decide about a call's result, and note what the call has made. `rule`: how to repeat it; None: not at all."""
        row = call.row
        registry = self.registry
        if (
            rule is not None
            and isinstance(result, Tensor)
            and is_ordinary(result)
            and may_drop(registry, row, call.arguments, result)
        ):
            if call.inside:
                drop_foreign_parts(registry, call, result)
            is_written = call.version is not None and result is call.args[0] and result._version == call.version + 1
            is_new = not (call.overwrites or id(result) in map(id, call.arguments))
            if is_written or is_new:
                self.decide(rule, call, result)
        else:
            call.why = "only a budget repeats it" if row.is_slow else ""
        registry.storages.note_made(call.arguments, result, call.site or True)
        if call.why and isinstance(result, Tensor) and result.grad_fn is not None:
            registry.log.explain(result, registry.find_value(result), call.why)
        for value, tensor in call.unsettled:  # those that have got no recipe go to the hooks around (rule 10)
            if isinstance(value.source, Kept) and not (value.sign_consumer_count or value.source.is_modified()):
                value.source = Kept(tensor, registry.outer)
        self.note_conclusion(call, result)

    def hold_elsewhere(self, excess_bytes: int, size: int) -> None:
        """Hold what the rest of the pass saves outside of the device's memory: its results are larger than planned.

        To drop all of it would help little, because the backward pass would make it again. `excess_bytes`: of results
        beyond those planned so far. `size`: of the last one.
        """
        self.elsewhere = Elsewhere()
        self.excess_bytes = max(excess_bytes, _MEETING * size)
        self.fluctuation_bytes = excess_bytes
        self.registry.outer = self.elsewhere.hooks

    @property
    def growth(self) -> float:
        """How many times as large as planned its results were in the end. Experts may exceed it for a while."""
        return 0.0 if self.policy is None else self.policy.result_bytes / max(self.policy.planned_bytes, 1)

    def decide(self, rule: Rule, call: Call, result: Tensor) -> None:
        """Decide whether a result gets a recipe."""
        if self.elsewhere is not None:
            self.excess_bytes = max(self.excess_bytes, _MEETING * result.nbytes)
            if self.policy is not None:
                self.policy.result_bytes += result.nbytes
        elif self.policy is not None:
            decide_by_plan(self.registry, self.policy, rule, call, result)
            if self.policy.excess_bytes:
                self.hold_elsewhere(self.policy.excess_bytes, result.nbytes)
        else:
            again = prepare_to_repeat(self.registry, rule, call, result)
            if again is not None:
                give_recipe(self.registry, again, call, result)

    def _pack_unless_abandoned(self, tensor: Tensor) -> object:
        return Kept(tensor, None) if self.end_if_abandoned() else pack(self.registry, tensor)


def _dispatch(types: Any, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Dispatch a call to tensor subclasses."""
    for kind in types:
        result = kind.__torch_function__(function, types, args, kwargs)
        if result is not NotImplemented:
            return result
    return NotImplemented


def may_differ_when_repeated(arguments: Any) -> bool:
    """Whether a checkpoint around a network would get other tensors when it repeats a pass with these arguments.

    A backward pass that starts at a tensor with metadata (`adds_metadata`) disables all subclasses. In a checkpoint
    that it repeats, functions then return ordinary tensors instead of views with metadata.
    """
    if current_hooks() is None:
        return False
    return not subclasses_are_asked() or any([adds_metadata(type(tensor)) for tensor in tensors_in(arguments)])


def hooks_around() -> list[Hooks]:
    """The saved-tensor hooks that are set, innermost first."""
    around: list[Hooks] = []
    try:
        hooks = current_hooks()
        while hooks is not None:
            around.append(hooks)
            pop_hooks()
            hooks = current_hooks()
    finally:
        for hooks in reversed(around):
            push_hooks(*hooks)
    return around


def is_ours(hooks: Hooks) -> bool:
    """Whether these saved-tensor hooks are ours: of a recorded pass, or of a counted step."""
    hook = hooks[0]
    owner = hook.args[0] if isinstance(hook, partial) and hook.func is pack else getattr(hook, "__self__", None)
    return isinstance(owner, (Recording, Registry))


set_aside_while_disabled(is_ours)


def clear_if_ended(frame: FrameType | None) -> bool:
    """Whether a call has ended (None: no). If so, the variables are freed that a traceback holds.

    A `finally` would be simpler, but a module calls no hooks after Ctrl-C, and a changed `forward` would stay bound to
    the network in its replicas and copies. Freed objects do not tell either, as a notebook holds the traceback.
    """
    if frame is None:
        return False
    try:
        frame.clear()
    except RuntimeError:  # it is running
        return False
    return True
