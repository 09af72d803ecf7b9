"""Steps of a plain and a prepared network: they agree to the bit, or both raise."""

import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from keepless.recompute.passes.advised import Advised
from keepless.recompute.signatures import plans as plans_module
from keepless.recompute.step.search import Choice, frontier
from keepless.recompute.step.step import Kind, Step

# In evaluation without gradients, transformers have a kernel that rounds otherwise, which no function mode sees.
torch.backends.mha.set_fastpath_enabled(False)
# Prepares a network for a step: returns its arguments, and the tensors that get gradients.
Setup = Callable[[nn.Module], tuple[tuple[Any, ...], list[Tensor]]]
Forward = Callable[[], Any]
Found = list[Tensor | None] | BaseException
grad = partial(torch.autograd.grad, allow_unused=True)


def on(x: Tensor, needs_gradient: bool = True) -> Setup:
    """A step on a tensor."""

    def setup(network: nn.Module) -> tuple[tuple[Any, ...], list[Tensor]]:
        w = x.detach().clone().requires_grad_(needs_gradient)
        return (w,), [tensor for tensor in (w, *network.parameters()) if tensor.requires_grad]

    return setup


def by_backward(losses: list[Tensor], sources: list[Tensor]) -> list[Tensor | None]:
    """Reentrant checkpoints allow nothing else."""
    for source in sources:
        source.grad = None
    torch.autograd.backward(losses)
    return [source.grad for source in sources]


def in_parts(losses: list[Tensor], sources: list[Tensor]) -> list[Tensor | None]:
    """Several backward passes over a graph, the first of which needs a part of it."""
    part = grad(losses, sources[-1:], retain_graph=True)
    return [*part, *grad(losses, sources, retain_graph=True), *grad(losses, sources)]


def second_derivatives(losses: list[Tensor], sources: list[Tensor]) -> list[Tensor | None]:
    first = grad(losses, sources, create_graph=True)
    return [
        *first,
        *grad(torch.stack([gradient.square().sum() for gradient in first if gradient is not None]).sum(), sources),
    ]


def freed_in_part(losses: list[Tensor], sources: list[Tensor]) -> list[Tensor | None]:
    """The backward pass of the first loss frees what both share. The second one needs only its own head."""
    return [*grad(losses[0], sources), *grad(losses[-1], sources[1:2])]


def in_another_thread(losses: list[Tensor], sources: list[Tensor]) -> list[Tensor | None]:
    """CUDA does this: checkpoints repeat their forward pass there. Numbers of nodes begin anew in each thread."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(grad, losses, sources).result()


Use = Callable[[list[Tensor], list[Tensor]], Sequence[Tensor | None]]
USES: tuple[Use, ...] = (by_backward, in_parts, second_derivatives, freed_in_part, in_another_thread)


def copied_alike(x: Tensor) -> Tensor:
    """A copy with the same strides: other kernels round otherwise."""
    if x.layout is not torch.strided or x.is_conj() or x.is_neg():
        return x.clone()
    size = x.untyped_storage().nbytes() // x.itemsize
    return x.detach().as_strided((size,), (1,), 0).clone().as_strided(x.shape, x.stride(), x.storage_offset())


# Saved-tensor hooks around a pass, which pass tensors on, alias them, or copy them.
KEEPING = [lambda x: x, lambda x: x.data, copied_alike]
AROUND = [nullcontext, save_on_cpu, *(partial(saved_tensors_hooks, keep, lambda tensor: tensor) for keep in KEEPING)]


def write_over(outputs: Any) -> None:
    with torch.no_grad():
        for tensor in outputs.pop("given", ()) if isinstance(outputs, dict) else ():
            tensor.mul_(2)


def once(forward: Forward) -> Forward:
    return forward


def several(forward: Forward) -> Forward:
    """A pass without gradients, and two with them."""

    def passes() -> dict[str, Any]:
        torch.no_grad()(forward)()
        first, second = forward(), forward()
        return {"out": first["out"] + second["out"], "second": second["second"], "given": first["given"]}

    return passes


def under_a_checkpoint(forward: Forward) -> Forward:
    """Which the caller's writes are under, too."""

    def part() -> dict[str, Any]:
        write_over(outputs := forward())
        return outputs

    return partial(checkpoint, part, use_reentrant=False)


def under(mode: Callable[[], Any], forward: Forward) -> Forward:
    def wrapped() -> Any:
        with mode():
            return forward()

    return wrapped


def run(
    network: nn.Module, setup: Setup, use: Use = by_backward, wraps: Any = once, around: Any = nullcontext
) -> Found:
    """The outputs, gradients, buffers, and the next random number; or the error that a program may raise.

    Between the passes, the caller writes over the tensors that a program gives it for that.
    """
    torch.manual_seed(1)
    arguments, sources = setup(network)
    torch.manual_seed(0)
    try:
        with around():
            outputs = wraps(partial(network, *arguments))()
        outputs = outputs if isinstance(outputs, dict) else {"out": outputs}
        write_over(outputs)
        tensors = outputs.values()
        gradients = use([tensor.abs().square().mean() for tensor in tensors if tensor.requires_grad], sources)
        buffers = [buffer.clone() for buffer in network.buffers()]
        return [*(tensor.detach().clone() for tensor in tensors), *gradients, *buffers, torch.rand(1)]
    except (Exception, KeyboardInterrupt) as error:
        return error.with_traceback(None)  # which would keep a checkpoint from ending


REFUSED = re.compile("modified by an inplace operation|norms have no second derivative")


def is_refused(actual: Found) -> bool:
    return isinstance(actual, Exception) and bool(REFUSED.search(str(actual)))


def agrees(plain: Found, prepared: Found, may_refuse: bool = False) -> bool:
    """`may_refuse`: the program writes where no call can be seen, so the prepared one may raise PyTorch's error."""
    refused = [is_refused(plain), is_refused(prepared)]
    if may_refuse and any(refused):
        return True
    if isinstance(plain, BaseException) or isinstance(prepared, BaseException):
        assert isinstance(prepared, BaseException), f"only the plain one raised {plain}"
        assert isinstance(plain, BaseException), f"only the prepared one raised {prepared}"
        assert all(refused) or str(plain) == str(prepared), (plain, prepared)
        return False
    for expected, actual in zip(plain, prepared, strict=True):
        assert type(actual) is type(expected) and getattr(actual, "meta", None) == getattr(expected, "meta", None)
        if expected is not None:
            torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True, check_stride=False)
    return True


def agree(
    plain: nn.Module,
    prepared: nn.Module,
    setup: Setup,
    use: Use = by_backward,
    wraps: Callable[[Forward], Forward] = once,
    around: Callable[[], Any] = nullcontext,
    may_refuse: bool = False,
) -> bool:
    """Compare a step of the two networks. True if results agree, False if both raise the same error.

    `around`: hooks around the prepared network's pass, which change nothing. But PyTorch checks no versions then, so a
    step that raises is not compared. Where PyTorch refuses a write, a prepared network may have kept a copy: then its
    gradients are those of copying hooks.
    """
    before = {name: buffer.clone() for name, buffer in plain.named_buffers()}
    expected, actual = run(plain, setup, use, wraps), run(prepared, setup, use, wraps, around)
    may_differ = may_refuse or around is not nullcontext or isinstance(actual, BaseException)
    if is_refused(expected) and not may_differ:
        plain.load_state_dict(before, strict=False)
        expected = run(plain, setup, use, wraps, AROUND[-1])
    if isinstance(expected, BaseException) or isinstance(actual, BaseException):
        prepared.load_state_dict(plain.state_dict())  # one may have ended before its statistics changed
    if isinstance(expected, BaseException) and around is not nullcontext:
        return False
    return agrees(expected, actual, may_refuse)


def keep_by_chance(monkeypatch, draws: Random, shares: Sequence[float] = (0.0, 0.5, 0.5, 1.0)) -> None:
    """Plans keep one of these shares of the values that may be computed again. No shares: plans are searched for."""

    def drawn(step: Step, limit: int, **_: Any) -> list[Choice]:
        share = draws.choice(shares)
        kept = [
            value.kind == Kind.KEPT or (value.kind == Kind.FREE and draws.random() < share) for value in step.values
        ]
        return [Choice(0, 0.0, tuple(kept))]

    monkeypatch.setattr(plans_module, "frontier", drawn if shares else frontier)
    monkeypatch.setattr("keepless.recompute.step.counting.cost_of", lambda operator: None)  # measuring takes seconds


def note_followed(monkeypatch) -> list[bool]:
    """A list that gets True for each pass after the first that is like earlier ones, and False for one that differs."""
    conclude, noted_passes = Advised.has_followed.fget, []

    def noted(recording: Advised) -> bool:
        followed = conclude(recording)
        if not recording.is_first:
            noted_passes.append(followed)
        return followed

    monkeypatch.setattr(Advised, "has_followed", property(noted))
    return noted_passes


def note_unknown(monkeypatch) -> list[Any]:
    """A list that gets the functions of calls of later passes about which earlier ones have taught nothing."""
    run_by_rules_with_hooks = Advised.run_by_rules_with_hooks
    functions = []

    def noted(self: Advised, call: Any) -> Any:
        if not self.is_first and not call.is_advised:
            functions.append(call.function)
        return run_by_rules_with_hooks(self, call)

    monkeypatch.setattr(Advised, "run_by_rules_with_hooks", noted)
    return functions
