"""Networks as `torch.export` programs, which run without this code.

`torch.export` traces one example, with symbols for its sizes. Whatever the example decided becomes an assertion in the
program. Equality assertions only concern memory layout, or how PyTorch rounded a size, so `program_of` removes them. To
catch any that mattered, `largest_difference` compares the program with the network at other sizes.
"""

import copy
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx import GraphModule, Node

from engine.prediction.predictors import Predictor
from models.private_torch import ASSERT_SCALAR, NormBase
from models.segmentation import SegmentationNetwork, rounded_up

_EXAMPLE = 2, 72, 88  # N, H, W
_OTHERS = (1, 97, 131), (3, 64, 40)  # odd and even


class FromLevels(nn.Module):
    """The network to export: levels of 0 to 255, float32 (N, channels, H, W), of three RGB -> float32 logits.

    With `argmax`, classes instead: int64 (N, H, W), or (N,) for classifiers. `dtype`: of everything except norms.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, predictor: Predictor, dtype: torch.dtype, argmax: bool):
        super().__init__()
        self.network = copy.deepcopy(predictor.network).cpu().requires_grad_(False).eval()
        for module in self.network.modules():
            if not isinstance(module, NormBase):
                for weight in module.parameters(recurse=False):
                    # A 1x1 weight in channels_last counts as contiguous, but the program would assert cells > 1.
                    weight.data = weight.data.to(dtype).clone(memory_format=torch.contiguous_format)
                for name, values in module.named_buffers(recurse=False):
                    setattr(module, name, values.to(dtype) if values.is_floating_point() else values)
        self.register_buffer("mean", predictor.mean.cpu())
        self.register_buffer("std", predictor.std.cpu())
        self.dtype = dtype
        self.argmax = argmax

    def forward(self, images: Tensor) -> Tensor:
        inputs = (images - self.mean) / self.std
        logits = self.network(inputs if inputs.dtype == self.dtype else inputs.to(self.dtype))
        logits = logits if logits.dtype.itemsize >= 4 else logits.float()
        return predicted_classes(self.network, logits) if self.argmax else logits


def predicted_classes(network: nn.Module, logits: Tensor) -> Tensor:
    """The classes of pixels or images, int64 (N, …)."""
    return network.decide(logits).long() if isinstance(network, SegmentationNetwork) else logits.argmax(dim=1)


@contextmanager
def whole_paddings() -> Iterator[None]:
    """Context in which timm's networks of TensorFlow compute their padding in whole numbers.

    timm rounds a quotient up, which stays a term of every later layer's symbolic size: EfficientNet-Lite0 took more
    than ten minutes to export.
    """
    padding = sys.modules.get("timm.layers.padding")
    with patch.object(padding, "get_same_padding", _same_padding) if padding else nullcontext():
        yield


def _same_padding(size: int, kernel_size: int, stride: int, dilation: int) -> int:
    """Pixels to add along a side, so that ceil(size / stride) remain."""
    return max(rounded_up(size, stride) - stride + (kernel_size - 1) * dilation + 1 - size, 0)


def program_of(
    predictor: Predictor, size: Sequence[int] | None = None, dtype: torch.dtype | None = None, argmax: bool = False
) -> ExportedProgram:
    """The program of a network (see `FromLevels`), for any N, H, W or for one `size` (H, W), in `dtype` or its own.

    ValueError: the network cannot be exported, or not for all sizes.
    """
    rows, columns = predictor.mean.shape[2:]
    if (rows, columns) != (1, 1) and (size is None or (rows, columns) != (*size,)):
        raise ValueError(f"the network subtracts a mean image of {rows}x{columns} pixels: give size=[{rows},{columns}]")
    count, height, width = _EXAMPLE if size is None else (_EXAMPLE[0], *size)
    network = FromLevels(predictor, dtype or predictor.mean.dtype, argmax)
    dynamic = {0: Dim.DYNAMIC}
    if size is None:
        dynamic |= {2: Dim.DYNAMIC, 3: Dim.DYNAMIC}
    images = torch.rand(count, predictor.channels, height, width, dtype=network.mean.dtype)
    try:
        with whole_paddings():
            program = torch.export.export(
                network, (images,), dynamic_shapes=(dynamic,), prefer_deferred_runtime_asserts_over_guards=True
            )
    except Exception as error:  # PyTorch's errors have many types
        raise ValueError(_message_of_export(error, size, network.dtype)) from error
    return _generalised(program)


def _message_of_export(error: Exception, size: Sequence[int] | None, dtype: torch.dtype) -> str:
    """What torch.export could not do, why, and what may help. `size`: see `program_of`."""
    reason = " ".join(str(error).split())[:300]
    if size is None:
        sizes = "images of all sizes"
        advice = " (give size=[HEIGHT,WIDTH], which is easier to follow)"
    else:
        sizes = f"images of {size[0]}x{size[1]} pixels"
        advice = ""
    if dtype != torch.float32:
        advice += " (bodies that add in float32, such as RevNets, need float32)"
    return f"torch.export cannot follow the network for {sizes} in {dtype}: {type(error).__name__}: {reason}{advice}"


def _generalised(program: ExportedProgram) -> ExportedProgram:
    """The program without what only the example decided, and without names of files and classes."""
    graph = program.graph_module
    _remove_equality_assertions(graph)
    for node in graph.graph.nodes:
        for key in ("stack_trace", "nn_module_stack", "source_fn_stack", "torch_fn"):
            node.meta.pop(key, None)
    graph.recompile()
    return ExportedProgram(  # without the guards of the old one, which are equalities too
        root=graph,
        graph=graph.graph,
        graph_signature=program.graph_signature,
        state_dict=program.state_dict,
        range_constraints=program.range_constraints,
        module_call_graph=program.module_call_graph[:1],
        example_inputs=program.example_inputs,
        constants=program.constants,
        verifiers=program.verifiers,
    )


def largest_difference(
    run: Callable[[Tensor], Tensor], predictor: Predictor, size: Sequence[int] | None = None
) -> float:
    """How far `run` is from the network on random images, of several sizes or of `size`.

    For logits: the largest difference, relative to the largest logit. For classes: the share that differs.
    """
    worst = 0.0
    for count, height, width in _OTHERS if size is None else ((1, *size), (3, *size)):
        generator = torch.Generator().manual_seed(height)
        shape = count, predictor.channels, height, width
        images = 255 * torch.rand(shape, generator=generator, dtype=predictor.mean.dtype)
        with torch.inference_mode():
            logits = predictor(images)
            outputs = run(images)
        if outputs.is_floating_point():
            difference = (outputs - logits).abs().max() / logits.abs().max()
        else:
            difference = (outputs != predicted_classes(predictor.network, logits)).double().mean()
        worst = max(worst, difference.item())
    return worst


def _remove_equality_assertions(module: GraphModule) -> None:
    """Remove the assertions that two sizes are equal, or that they differ, however often they are negated."""
    for node in module.graph.find_nodes(op="call_function", target=ASSERT_SCALAR):
        condition = node.args[0]
        while isinstance(condition, Node) and condition.target is torch.sym_not:
            condition = condition.args[0]
        if isinstance(condition, Node) and condition.target in (operator.eq, operator.ne):
            module.graph.erase_node(node)
    module.graph.eliminate_dead_code()
