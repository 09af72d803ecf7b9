"""Methods to train a network in less memory, and how close their gradients are to the plain network's."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from keepless import recompute_activations
from keepless.recompute.step.costs import peak_bytes
from keepless.saved import kept_bytes
from keepless.torch_internals import is_capturing, tree_flatten, tree_leaves, tree_unflatten
from scripts.evidence.zoo import blocks_of
from scripts.reports.frame import reason
from scripts.reports.markdown import Rows
from scripts.reports.measuring import autocast, captured, compiled, timed

PLAIN, RECOMPUTED, BLOCKS = "plain", "recompute_activations", "checkpoint per block"
ON_CPU, COMPILED, BUDGET = "save_on_cpu", "compiled", "compiled, budget 0.5"
METHODS = (PLAIN, RECOMPUTED, BLOCKS, ON_CPU, COMPILED, BUDGET)
AS_GRAPH = ", captured"  # in the name of a step that runs as a CUDA graph
NOT_CAPTURED = (ON_CPU, COMPILED, BUDGET)  # memory on the host; code of a compiler that has graphs of its own
WITH_COMPILER = ("resnet50", "mobilenet_v2", "efficientnet_b0", "regnet_y_400mf", "convnext_tiny", "vit_b_16")
WARM_UP_STEPS = 3  # before a peak is measured: the third corrects a plan, which no step does under the profiler
Forward = Callable[[Tensor], object]  # inputs -> tensors, maybe in containers


class WithLoss(nn.Module):
    """A network and its loss in one module, so that a plan counts the loss, which may dominate in segmentation."""

    def __init__(self, network: nn.Module, forward: Forward | None = None):
        super().__init__()
        self.network, self.run = network, network if forward is None else forward

    def forward(self, inputs: Tensor) -> Tensor:
        return mean_squares(self.run(inputs))


def mean_squares(outputs: object) -> Tensor:
    """A loss for any network: the sum of its outputs' mean squares."""
    return torch.stack([output.square().mean() for output in tree_leaves(outputs)]).sum()


def training_step(network: nn.Module, inputs: Tensor, precision: str) -> None:
    """Forward and backward pass. Gradients already exist, and are zeroed first."""
    network.zero_grad(set_to_none=False)
    with autocast(inputs.device.type, precision):
        loss = network(inputs)
    loss.backward()


def forward_of(network: nn.Module, method: str, compiler: str | None = None) -> Forward:
    """A network's forward pass by one of the methods. This may change the network."""
    if method == RECOMPUTED:
        return recompute_activations(network)
    if method == BLOCKS:
        for block in blocks_of(network):
            block.forward = partial(checkpointed, block.forward)
    elif method == ON_CPU:
        return partial(_saved_on_cpu, network)
    elif method in (COMPILED, BUDGET):
        assert compiler is not None
        return compiled(network, compiler, budget=0.5 if method == BUDGET else 1.0)
    return network


def checkpointed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A block that keeps only its inputs. They are passed one by one, so that those in lists also count as kept.

    While a CUDA graph is captured, the state of random numbers cannot be set back: a replay may draw others again.
    """
    leaves, structure = tree_flatten((args, kwargs))

    def run(*leaves: Any) -> Any:
        args, kwargs = tree_unflatten(leaves, structure)
        return forward(*args, **kwargs)

    return checkpoint(run, *leaves, use_reentrant=False, preserve_rng_state=not is_capturing())


def _saved_on_cpu(network: nn.Module, inputs: Tensor) -> object:
    with save_on_cpu(pin_memory=True):
        return network(inputs)


def methods_of(name: str, network: nn.Module, device: str, compiler: str | None) -> list[str]:
    """The methods that apply to a network."""
    is_compiled = compiler is not None and name in WITH_COMPILER
    applies = {BLOCKS: bool(blocks_of(network)), ON_CPU: device == "cuda", COMPILED: is_compiled}
    applies[BUDGET] = is_compiled and not drops_at_random(network)
    return [method for method in METHODS if applies.get(method, True)]


def drops_at_random(network: nn.Module) -> bool:
    """Whether a module drops values or whole residuals with a probability p above 0.

    With a budget below 1, the compiler's gradients would be wrong on CPUs (pytorch/pytorch#190758).
    """
    named = (module for module in network.modules() if re.search("Drop|Stochastic", type(module).__name__))
    return any(getattr(module, "p", 0) > 0 for module in named)


def gradients_of(network: nn.Module, inputs: Tensor, precision: str) -> Tensor:
    """The gradients of all trained parameters as one vector, always with the same random numbers."""
    parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
    torch.manual_seed(0)
    with autocast(inputs.device.type, precision):
        loss = network(inputs)
    return torch.cat([gradient.flatten() for gradient in torch.autograd.grad(loss, parameters, materialize_grads=True)])


def deviation(gradients: Tensor, reference: Tensor) -> float:
    """The largest difference, relative to the reference's largest gradient."""
    return ((gradients - reference).abs().max() / reference.abs().max()).item()


class Compared:
    """The steps of one network by several methods: the counts of each, and why some failed."""

    def __init__(self, name: str, precision: str, plain: nn.Module, inputs: Tensor):
        self.common = {"network": name, "precision": precision}
        self.precision, self.inputs = precision, inputs
        self.reference = gradients_of(WithLoss(plain), inputs, precision)
        self.steps: dict[str, Callable[[], object]] = {}
        self.rows: dict[str, dict] = {}
        self.failed: Rows = []

    def add(self, method: str, network: WithLoss, **facts: object) -> None:
        """Take steps until a budget has its plan, and count. Raises only if the plain network fails."""
        step, device = partial(training_step, network, self.inputs, self.precision), self.inputs.device.type
        try:
            for _ in range(WARM_UP_STEPS):  # gradients exist; compiles
                step()
            row = {**self.common, "method": method, "peak_bytes": peak_bytes(step, device), **facts}
            if method in METHODS and method != ON_CPU:
                with autocast(device, self.precision):
                    row["kept_bytes"] = kept_bytes(network.network, partial(network.run, self.inputs), [self.inputs])
            if method not in (COMPILED, BUDGET):  # a second plain run shows the noise
                row["deviation"] = deviation(gradients_of(network, self.inputs, self.precision), self.reference)
            self.rows[method], self.steps[method] = row, step
        except Exception as error:  # e.g. out of memory, or the compiler's: the others can still be measured
            if method == PLAIN:  # nothing to compare with
                raise
            self.failed.append({**self.common, "method": method, "reason": reason(error)})

    def timed(self, rounds: int) -> Rows:
        """A row for each method: its times, measured in turns with the others, or the reason why it failed."""
        times_ms = timed(self.steps, rounds, self.inputs.device.type)
        return [*({**row, "times_ms": times_ms[method]} for method, row in self.rows.items()), *self.failed]

    def captured(self, rounds: int) -> Rows:
        """As `timed`, for the steps as CUDA graphs. Their memory is not measured, because it belongs to the graphs."""
        device, graphs, failed = self.inputs.device.type, dict[str, Callable[[], object]](), Rows()
        for method, step in self.steps.items():
            if method not in NOT_CAPTURED:
                method += AS_GRAPH
                try:
                    graphs[method] = captured(step, device)
                except Exception as error:  # the others can still be captured
                    failed.append({**self.common, "method": method, "reason": reason(error)})
        try:
            times_ms = timed(graphs, rounds, device)
        except Exception as error:  # the device's, which ends all work on it in this process
            return [*failed, {**self.common, "method": "CUDA graphs", "reason": reason(error)}]
        return [*({**self.common, "method": method, "times_ms": own} for method, own in times_ms.items()), *failed]
