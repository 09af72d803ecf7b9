"""Train any network in less memory, with the same gradients: cheap activations are recomputed instead of saved."""

import sys
import threading
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import CoroutineType, FrameType, GeneratorType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from .inputs import Network, check_has_forward, check_module, parts_with_forward, tensors_in
from .recompute.passes.plan import Plan
from .recompute.passes.recording import RUN_AGAIN, Recording, clear_if_ended, is_ours, may_differ_when_repeated
from .recompute.passes.report import KeptTensor, Report, summary
from .recompute.signatures.plans import Budget, arguments_of, parsed_budget
from .recompute.signatures.signatures import Signatures
from .recompute.step.sharded import is_sharded
from .torch_internals import (
    KeeplessWarning,
    call_at_compilation,
    current_hooks,
    hooks_are_allowed,
    is_compiled,
    transform_level,
    warn,
)


def recompute_activations(
    network: Network,
    *,
    checkpointed_only: bool = False,
    budget: Budget | None = None,
    example: Any = None,
    strict: bool = False,
) -> Network:
    """Make a network recompute cheap activations in its backward pass, instead of saving them.

    The results of norms, activations, arithmetic, concatenations, copies, views, dropout, pooling and upsampling
    (modules or functions) are cheap if their inputs are saved anyway, and are at most 16 times larger (a small mean is
    saved). So are the outputs of `CheckpointedABN`. Each is recomputed once per backward pass, and held from its first
    consumer to its last. No module is replaced. Outputs and gradients do not change; on CPUs in float32 they are
    bitwise identical. Frozen convolutions and norms save only their input's shape, ReLU and LeakyReLU only a sign mask,
    unless another operation needs the tensor.

    It works in eager mode, while gradients are recorded, inside the network's own forward pass. In `torch.compile` the
    compiler decides what to keep, and a warning says so: wrap blocks in `torch.utils.checkpoint` there. Other
    saved-tensor hooks around it, such as `torch.autograd.graph.save_on_cpu`, keep working: they get what stays saved.

    Tensors and weights that the backward pass reads, frozen ones too, must not be modified in place before it: this
    raises PyTorch's error about an in-place operation, also under other hooks. Changes through `.data` or an array
    after the forward pass, and by code in C++, are not detected. Under a `TorchFunctionMode` or `TorchDispatchMode` of
    the program nothing is recomputed, and a warning names it.

    Args:
        network: any uncompiled network; it is returned with two hooks around its forward pass, which `undo` removes.
            Branches of couplings get hooks of their own, because they run again separately. If a training step calls
            only parts of the network, a warning names them.
        checkpointed_only: recompute only the outputs of `CheckpointedABN` (the paper's checkpointing).
        budget: limit on the peak memory of a forward and backward pass: bytes, such as "6GiB" or an int, or a share of
            the baseline's peak, such as 0.3. Bytes are beside weights, optimiser states and the gradients of all
            trained parameters. If no parameter has a gradient before the pass, as after `zero_grad()`, activations
            use the room of those that are still to come. A share is of the step as it runs, with the gradients that
            come in it. With a budget, convolutions, matrix products, attention and the like are recomputed too, where
            that costs the least time.
            The first step with a shape is watched, and the plan holds from the second one: until its backward pass,
            what the first one saves is held in host memory, or on CPUs in a file in `$TMPDIR`. If no plan is within the
            budget, the one with the lowest peak is used, and a warning gives that peak and its place.
        example: an input, as `plan` takes it. A step on it is watched now, so the plan holds from the first step of the
            training. The loss is the mean square of the outputs. Gradients, buffers and random states stay as they are,
            and hooks on parameters are not called.
        strict: raise a RuntimeError instead of a warning where a step may exceed its budget: before the pass, if no
            plan keeps it, or at its end, if its results were larger than planned.

    Raises:
        ValueError: the network's own forward pass is never called, e.g. it is an `nn.ModuleList`; it has lazy modules;
            the budget is not valid, or is given with `checkpointed_only`; an example is given without a budget, or the
            network does not run on it.
        TypeError: an option is given without its name.
    """
    check_module(network, "recompute_activations")
    check_has_forward(network, "recompute_activations")
    if any(map(is_lazy, network.parameters())):
        raise ValueError(
            "recompute_activations got lazy modules, which learn their sizes in the forward pass: first run the "
            "network on an input under torch.no_grad()"
        )
    signatures = Signatures(None if budget is None else parsed_budget(budget), strict)
    if budget is not None and checkpointed_only:
        raise ValueError(f"budget={budget} with checkpointed_only=True: expected only one of them")
    if budget is None and (example is not None or strict):
        name = "an example" if example is not None else "strict=True"
        raise ValueError(f"{name} is given without a budget: expected budget=…, such as '6GiB'")
    if is_compiled(network):
        _say_that_the_compiler_decides(None)
        return network
    if example is not None:
        signatures.plan_example(network, *arguments_of(example))
    for module in _recorded_modules(network):
        _remove_hooks(module)
        hooks = _Hooks(checkpointed_only, signatures if module is network else Signatures())
        hooks.register(module, expects_call=module is network)
    return network


def undo(network: Network) -> Network:
    """Undo `recompute_activations`: remove its hooks from the network and all its parts, and return the network."""
    check_module(network, "undo")
    for module in network.modules():
        _remove_hooks(module)
    return network


def share_plans(network: nn.Module) -> None:
    """Make all ranks use the plans of rank 0 for the inputs that both have seen. Every rank must call it.

    Each rank measures its own times, so plans may differ, and the slowest rank delays the others. Plans do not change
    gradients. ValueError if the network has no budget.
    """
    check_module(network, "share_plans")
    hooks = _hooks_of(network)
    if hooks is None or hooks.signatures.budget is None:
        raise ValueError("share_plans got a network without a budget: call recompute_activations(network, budget=…)")
    if dist.is_initialized():
        hooks.signatures.share_plans()


def report(network: nn.Module) -> Report:
    """Report what a prepared network saved for backward in its last forward pass. Call it after a step and print it.

    It says why each tensor is saved: without a budget by which rule, with one whether the plan keeps it or it cannot be
    recomputed. If the pass stopped repeating the calls of earlier ones, only tensors from there on are listed. Bytes
    are those of the pass in which the calls were learned, also if later inputs have another size.

    ValueError if the network is not prepared, or has not run with gradients yet.
    """
    check_module(network, "report")
    hooks = _hooks_of(network)
    if hooks is None or hooks.kept is None:
        raise ValueError(
            "there is nothing to report: call recompute_activations(network), then the network itself with gradients"
        )
    return summary(hooks.kept, network)


def plan_of(network: nn.Module) -> Plan | None:
    """The plan that the last forward pass of a prepared network was given; None if it had none."""
    hooks = _hooks_of(network)
    return None if hooks is None else hooks.plan


@contextmanager
def recomputing() -> Iterator[None]:
    """Context in which cheap activations are recomputed, for code outside modules. See `recompute_activations`.

    It does nothing where gradients are not recorded, or inside a prepared network's forward pass.
    """
    _drop_abandoned()
    with Recording() if _can_record() else nullcontext() as recording:
        yield
    if recording is not None and recording.registry.refused_mode is not None:
        _say_that_a_mode_changes_results(recording.registry.refused_mode)


def _recorded_modules(network: nn.Module) -> list[nn.Module]:
    """The network, and the branches of its couplings, which run again by themselves."""
    couplings = [module for module in network.modules() if isinstance(module, tuple(RUN_AGAIN))]
    return [network, *(branch for coupling in couplings for branch in coupling.children())]


def _remove_hooks(module: nn.Module) -> None:
    """Remove our hooks from a module, if it has any."""
    hooks = _hooks_of(module)
    if hooks is None:
        return
    hooks.remove_gradient_hook()
    for registered in (module._forward_pre_hooks, module._forward_hooks):
        for key in [key for key, hook in registered.items() if getattr(hook, "__self__", None) is hooks]:
            del registered[key]
            for options in (module._forward_pre_hooks_with_kwargs, module._forward_hooks_always_called):
                options.pop(key, None)


def _hooks_of(module: nn.Module) -> "_Hooks | None":
    owners = [getattr(hook, "__self__", None) for hook in module._forward_hooks.values()]
    return next((owner for owner in owners if isinstance(owner, _Hooks)), None)


class _ForwardPass(NamedTuple):
    """A forward pass of a prepared module."""

    module: nn.Module
    recording: Recording | None  # None: not recorded
    frame: FrameType | None  # of the call that runs it; None if the recording has it


class _OpenPasses(threading.local):
    """The forward passes that run in a thread, innermost last."""

    def __init__(self) -> None:
        self.passes: list[_ForwardPass] = []


_open_in_thread = _OpenPasses()


class _Hooks:
    """Module hooks that record a forward pass."""

    def __init__(self, checkpointed_only: bool, signatures: Signatures):
        self.checkpointed_only = checkpointed_only
        self.signatures = signatures
        self.kept: Sequence[KeptTensor] | None = None  # in the last forward pass
        self.plan: Plan | None = None  # of the last forward pass
        self.gradient_hook: RemovableHandle | None = None  # of a parameter, until the module is called
        self.is_generator = False  # a warning has said that the module's calls run later
        self.is_compiled = False  # a compiled graph has called the module
        self.has_named_mode = False  # a warning has named a mode that changes results

    def __getstate__(self) -> dict[str, Any]:
        return vars(_Hooks(self.checkpointed_only, Signatures(self.signatures.budget, self.signatures.strict)))

    def register(self, module: nn.Module, expects_call: bool) -> None:
        """Set the hooks around a module's forward pass.

        `expects_call`: warn if the module trains before it is called itself.
        """
        module.register_forward_pre_hook(self.enter, with_kwargs=True)
        module.register_forward_hook(self.leave, always_call=True)
        if expects_call:
            self._set_gradient_hook(module)

    def _set_gradient_hook(self, network: nn.Module) -> None:
        """Warn if a parameter of the network gets a gradient in training before the network itself is called."""
        reference = weakref.ref(network)

        def warn_once(_: Tensor) -> None:
            prepared = reference()
            if prepared is not None and prepared.training:
                self.remove_gradient_hook()
                if not self.is_compiled:
                    _warn_if_parts_are_called(prepared)

        trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
        if trained:
            self.gradient_hook = trained[0].register_post_accumulate_grad_hook(warn_once)

    def remove_gradient_hook(self) -> None:
        if self.gradient_hook is not None:
            self.gradient_hook.remove()
            self.gradient_hook = None

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Start recording, before the module's forward pass."""
        if torch.compiler.is_compiling():
            self.is_compiled = True
            if not self.checkpointed_only:
                call_at_compilation(_say_that_the_compiler_decides)
            return
        _drop_abandoned()
        frame = sys._getframe(1)
        if self.gradient_hook is not None and torch.is_grad_enabled():
            self.remove_gradient_hook()
            if not self.checkpointed_only:
                _warn_of_compiled_parts(module)
        recording = self._new_recording(module, args, kwargs, frame) if _can_record() else None
        if recording is not None:
            recording.__enter__()
        # A frame keeps its callers' variables alive: after Ctrl-C checkpoints around it would not end (torch 2.11).
        _open_in_thread.passes.append(_ForwardPass(module, recording, frame if recording is None else None))

    def _new_recording(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType
    ) -> Recording | None:
        """The recording of a forward pass with these arguments; None if it may differ when a checkpoint repeats it."""
        if self.checkpointed_only:
            inputs = tensors_in((args, kwargs))
            return Recording(sees_calls=False, copy_parameters=is_sharded(module), inputs=inputs, frame=frame)
        if may_differ_when_repeated((args, kwargs)):
            return None
        return self.signatures.recording(module, args, kwargs, frame)

    def leave(self, module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        """End the recording after the module's forward pass, even if it raised."""
        if torch.compiler.is_compiling():
            return
        if not _open_in_thread.passes or _open_in_thread.passes[-1].module is not module:  # an earlier hook has raised
            return
        recording = _open_in_thread.passes.pop().recording
        if recording is None:
            return
        recording.__exit__(*(sys.exc_info() if output is None else (None, None, None)))
        self.kept = recording.kept
        self.plan = None if recording.signature is None else recording.signature.plan
        if isinstance(output, (GeneratorType, CoroutineType)) and not self.is_generator:
            self.is_generator = True
            _say_that_calls_run_later(module, output)
        self.signatures.pass_has_ended(module, recording, output)
        if recording.registry.refused_mode is not None and not self.has_named_mode:
            self.has_named_mode = True
            _say_that_a_mode_changes_results(recording.registry.refused_mode)


def _can_record() -> bool:
    """Whether gradients are recorded, hooks are allowed, and no other recording is active."""
    if not (torch.is_grad_enabled() and hooks_are_allowed()) or transform_level() is not None:
        return False
    return not (torch.jit.is_tracing() or torch.compiler.is_compiling() or _is_recorded())


def _drop_abandoned() -> None:
    """Drop passes interrupted by Ctrl-C, unless another context was entered inside them."""
    while _open_in_thread.passes:
        _, recording, frame = _open_in_thread.passes[-1]
        has_ended = clear_if_ended(frame) if recording is None else recording.leave_abandoned()
        if not has_ended:
            return
        _open_in_thread.passes.pop()


_COMPILED = (
    "recompute_activations does nothing inside {}, where the compiler decides what to keep: wrap blocks in "
    "torch.utils.checkpoint, which it follows, or train without torch.compile"
)


def _say_that_the_compiler_decides(_: object) -> None:
    """Warn, while `torch.compile` traces a graph."""
    warnings.warn(_COMPILED.format("torch.compile"), KeeplessWarning, stacklevel=1)


def _warn_of_compiled_parts(network: nn.Module) -> None:
    names = [name for name, module in network.named_modules() if is_compiled(module)]
    if names:
        warn(_COMPILED.format(f"torch.compile ({', '.join(names[:3])}{', …' if len(names) > 3 else ''})"))


def _say_that_calls_run_later(module: nn.Module, output: object) -> None:
    warn(
        f"the forward pass of {type(module).__name__} returns a {type(output).__name__}, whose calls run later, so "
        f"everything is saved: return tensors, or compute the loss inside `with keepless.recomputing():`"
    )


def _say_that_a_mode_changes_results(mode: type) -> None:
    warn(
        f"nothing is recomputed under {mode.__name__}, because this mode may change what functions compute: the step "
        f"saves as much as the baseline; leave the mode before the forward pass"
    )


def _warn_if_parts_are_called(network: nn.Module) -> None:
    """Warn, in a backward pass, if the step has called parts of a network instead of the network."""
    parts = {
        path: part
        for path, part in parts_with_forward(network).items()
        if any(parameter.grad is not None for parameter in part.parameters()) and _hooks_of(part) is None
    }
    if parts:
        names = f"sub-module{'s' if len(parts) > 1 else ''} {', '.join(map(repr, [*parts][:3]))}"
        warn(
            f"recompute_activations has prepared a {type(network).__name__}, but this step calls parts of it, or a "
            f"method such as forward, instead of the module, so everything is kept: prepare its "
            f"{names}{', …' if len(parts) > 3 else ''} instead, or leave it unprepared and compute the loss inside "
            f"`with keepless.recomputing():`"
        )


def _is_recorded() -> bool:
    """Whether a recording is active: the innermost hooks are its own, or there are none, and it needs none."""
    hooks = current_hooks()
    if hooks is not None:
        return is_ours(hooks)
    all_recordings = [forward_pass.recording for forward_pass in _open_in_thread.passes]
    recordings = [recording for recording in all_recordings if recording is not None]
    if not recordings:
        return False
    innermost = recordings[-1]
    return innermost.hooks is None and not innermost.is_abandoned
