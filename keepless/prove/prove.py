"""Prove on a network that steps within a budget are the baseline's, in less memory."""

import gc
import random
import sys
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu

from ..commands import autocast, network_and_example, one_line_error
from ..inputs import check_has_forward, check_module, tensors_in
from ..prepared import plan_of, recompute_activations, undo
from ..recompute.signatures.plans import Budget, arguments_of, parsed_budget
from ..recompute.step.costs import computing_device, peak_bytes, seconds_of
from ..recompute.step.snapshot import Snapshot, random_state
from ..recompute.step.watch import differentiable
from ..torch_internals import tree_map
from .proof import KINDS, Proof, Steps, proof_of

# Numbers of steps. They follow the plan, which the first or the second has made.
_MEASURED_STEP = 2
_TIMED_STEP = 3


def prove(network: nn.Module, example: Any, budget: Budget) -> Proof:
    """Compare steps within a budget with the baseline's on the network's device: their results, peaks and times.

    Four baseline steps run, four more to see how far these differ by themselves, and four prepared ones: the first of
    each are compared, the second of each, and so on. All begin from the same state, which is put back in the end:
    parameters, buffers, gradients, attributes of modules, and the random generators of PyTorch, Python and NumPy.
    Where state outside of the network changes a step, such as a global counter, the baseline differs by itself: then
    use `python -m keepless.prove`, which runs each four in a process of their own.

    The loss is the mean square of the outputs, which are held to the end of the step. If the baseline does not fit in
    memory, what it saves is moved to the CPU, and its peak is the estimated one.

    Args:
        network: prepared by `recompute_activations` or not. Call this under autocast to prove a step under autocast.
        example: its input: a tensor, a tuple of arguments, or a dictionary of keyword arguments.
        budget: as `recompute_activations` takes it.

    Raises:
        ValueError: an argument is not valid, or no output needs a gradient.
        Exception: whatever the network raises; in a prepared step also PyTorch's error about an in-place operation.
    """
    check_module(network, "prove")
    check_has_forward(network, "prove")
    parsed_budget(budget)
    inputs = tree_map(_detached_copy, arguments_of(example))
    before = Snapshot(network, inputs)
    try:
        baseline = _run_baseline_steps(network, inputs)
        again = _run_baseline_steps(network, inputs)
        return proof_of(baseline, again, _run_prepared_steps(network, inputs, budget), budget)
    finally:
        undo(network)
        before.restore()  # also hooks of `recompute_activations`


def proof_in_processes(name: str, budget: Budget, dtype: str | None) -> Proof:
    """The proof of MODULE:FUNCTION's network, whose baseline and prepared steps run in a process each.

    So none sees what another has left behind. `dtype`: of autocast. ValueError: its code raises an error.
    """
    with TemporaryDirectory() as folder:

        def steps_in_process(within: Budget | None) -> Steps:
            file = Path(folder) / "steps.pt"
            try:
                with ProcessPoolExecutor(1, get_context("spawn")) as process:
                    process.submit(_write_steps, name, within, dtype, file).result()
            except BrokenProcessPool as error:
                text = "was killed, perhaps as memory ran out: give a smaller example"
                raise ValueError(f"a process that runs steps of {name}'s network {text}") from error
            return Steps(*torch.load(file, weights_only=False))

        return proof_of(steps_in_process(None), steps_in_process(None), steps_in_process(budget), budget)


def _detached_copy(leaf: Any) -> Any:
    return leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


def _write_steps(name: str, budget: Budget | None, dtype: str | None, file: Path) -> None:
    """Run steps, within a budget or of the baseline, and write them to a file as `Steps`."""
    torch.manual_seed(0)
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    network, example = network_and_example(name)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        inputs = tree_map(lambda leaf: _telling_argument(device, leaf), arguments_of(example))
        network = network.to(device).train()
        with autocast(device, dtype):
            if budget is None:
                steps = _run_baseline_steps(network, inputs)
            else:
                steps = _run_prepared_steps(network, inputs, budget)
    except Exception as error:  # a network may raise anything
        raise one_line_error(error, f"a {'step' if budget is None else 'prepared step'} of {name}'s network") from None
    torch.save(tuple(steps), file)


def _telling_argument(device: str, leaf: Any) -> Any:
    """An argument on a device, with random numbers instead of zeros alone, by which most gradients would be zero."""
    if not isinstance(leaf, Tensor):
        return leaf
    argument = leaf.detach().to(device)
    if argument.is_floating_point() and not argument.any():
        argument = torch.randn_like(argument)
    return argument.requires_grad_(leaf.requires_grad)


def _run_baseline_steps(network: nn.Module, inputs: Any) -> Steps:
    """Run steps of the network without `recompute_activations`. `inputs`: arguments, and a dictionary of others."""
    undo(network)
    try:
        return _run_steps(network, inputs, is_baseline=True)
    except torch.OutOfMemoryError:
        pass  # now the tensors of its frames are freed
    with save_on_cpu():
        return _run_steps(network, inputs, is_baseline=True)._replace(fits=False)


def _run_prepared_steps(network: nn.Module, inputs: Any, budget: Budget) -> Steps:
    """Run steps of the network within a budget."""
    recompute_activations(undo(network), budget=budget)
    steps = _run_steps(network, inputs)
    plan = plan_of(network)
    return steps if plan is None else steps._replace(planned=plan.peak, plain=plan.plain)


def _run_steps(network: nn.Module, inputs: Any, is_baseline: bool = False) -> Steps:
    """Run four steps, each from the present state, and put it back. `is_baseline`: note the order of gradients."""
    args, kwargs = inputs
    snapshot = Snapshot(network, inputs)
    leaves = {**dict(network.named_parameters()), **_tensors_by_number("input", inputs)}
    awaited = [name for name, leaf in leaves.items() if leaf.grad is None]
    device = computing_device(leaves.values())
    results: list[dict[str, dict[str, Tensor]]] = []
    outputs: list[Any] = []  # of the running step: they exist as long as it

    def run_step() -> None:
        outputs.append(network(*args, **kwargs))
        torch.autograd.backward([output.square().mean() for output in differentiable(outputs)])

    try:
        with (
            warnings.catch_warnings(record=True) as caught,
            _gradient_order(leaves if is_baseline else {}) as order,
            torch.enable_grad(),
        ):
            warnings.simplefilter("always")
            for number in range(_TIMED_STEP + 1):
                snapshot.restore()
                if number == _MEASURED_STEP:
                    gc.collect()  # so that no memory of the steps before is freed in this one
                    peak = peak_bytes(run_step, device)
                else:
                    _, seconds = seconds_of(run_step, device)
                results.append(_results(network, leaves, outputs, results[-1] if results else {}))
                outputs.clear()
    finally:
        snapshot.restore()
    gradients = results[-1]["gradients"]
    coming = sum(gradients[name].nbytes for name in awaited if name in gradients)
    return Steps(results, peak, seconds, coming, [str(warning.message) for warning in caught], [*order])


@contextmanager
def _gradient_order(leaves: dict[str, Tensor]) -> Iterator[dict[str, None]]:
    """Context that yields names of leaves, which come into it in the order in which their first gradients come."""
    order: dict[str, None] = {}
    hooks = [
        leaf.register_post_accumulate_grad_hook(lambda _, name=name: order.setdefault(name))
        for name, leaf in leaves.items()
        if leaf.requires_grad
    ]
    try:
        yield order
    finally:
        for hook in hooks:
            hook.remove()


def _results(
    network: nn.Module, leaves: dict[str, Tensor], outputs: list[Any], previous: dict[str, dict[str, Tensor]]
) -> dict[str, dict[str, Tensor]]:
    """Copies of what a step has left, by kind and name. `previous`: the results of the step before, or empty."""
    gradients = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    states = {"state": random_state()}
    tensors_by_kind = (_tensors_by_number("output", outputs), gradients, dict(network.named_buffers()), states)
    return {
        kind: _copies(tensors, previous.get(kind, {})) for kind, tensors in zip(KINDS, tensors_by_kind, strict=True)
    }


def _tensors_by_number(name: str, holder: Any) -> dict[str, Tensor]:
    return {f"{name} {number}": tensor for number, tensor in enumerate(tensors_in(holder))}


def _copies(tensors: dict[str, Tensor], previous: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies on the CPU. Those of the previous step are used again if they are equal."""
    values = {name: tensor.detach().to_dense().cpu() for name, tensor in tensors.items()}
    equal = {name for name in values.keys() & previous.keys() if torch.equal(values[name], previous[name])}
    return {name: previous[name] if name in equal else value.clone() for name, value in values.items()}
