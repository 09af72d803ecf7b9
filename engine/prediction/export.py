"""Networks without this code: programs of `torch.export`, with norms folded into the convolutions before them.

`torch.export` follows one example, with symbols for its sizes. What the example decided becomes an assertion in the
program. Those about equality only say how memory lies, or how PyTorch rounded a size: `exported` takes them out. So
that no other one is lost, `largest_difference` compares the program with the network at other sizes.
"""

import copy
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import ExportGraphSignature
from torch.fx import GraphModule, Node
from torch.nn.utils.fusion import fuse_conv_bn_weights

from engine.prediction.predictors import Predictor
from keepless.torch_internals import ASSERT_SCALAR, NormBase

_EXAMPLE = 2, 72, 88  # N, H, W
_OTHERS = (1, 97, 131), (3, 64, 40)  # odd and even
_ATEN = torch.ops.aten
_CONVOLUTIONS = (_ATEN.conv1d.default, _ATEN.conv2d.default, _ATEN.conv3d.default)


class FromLevels(nn.Module):
    """The network to export: levels of 0 to 255, float32 (N, 3, H, W) RGB -> float32 logits.

    With `argmax`, the classes instead: int64, (N, H, W), or (N,) of whole images. `dtype`: of everything but the norms.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, predictor: Predictor, dtype: torch.dtype, argmax: bool):
        super().__init__()
        self.network = copy.deepcopy(predictor.network).cpu().requires_grad_(False).eval()
        for module in self.network.modules():
            if not isinstance(module, NormBase):
                for weight in module.parameters(recurse=False):
                    weight.data = weight.data.to(dtype).contiguous()
                for name, values in module.named_buffers(recurse=False):
                    setattr(module, name, values.to(dtype) if values.is_floating_point() else values)
        self.register_buffer("mean", predictor.mean.cpu())
        self.register_buffer("std", predictor.std.cpu())
        self.dtype, self.argmax = dtype, argmax

    def forward(self, images: Tensor) -> Tensor:
        inputs = (images - self.mean) / self.std
        logits = self.network(inputs if inputs.dtype == self.dtype else inputs.to(self.dtype))
        logits = logits if logits.dtype.itemsize >= 4 else logits.float()
        return logits.argmax(dim=1) if self.argmax else logits


def exported(
    predictor: Predictor,
    size: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    argmax: bool = False,
    fold: bool = True,
) -> ExportedProgram:
    """The program of a network, see `FromLevels`, for any N, H and W, or for one `size` (H, W), in `dtype` or its own.

    ValueError: the network cannot be exported, or not for all sizes.
    """
    count, height, width = _EXAMPLE if size is None else (_EXAMPLE[0], *size)
    network, dynamic = FromLevels(predictor, dtype or predictor.mean.dtype, argmax), {0: Dim.DYNAMIC}
    if size is None:
        dynamic |= {2: Dim.DYNAMIC, 3: Dim.DYNAMIC}
    images = torch.rand(count, 3, height, width, dtype=network.mean.dtype)
    try:
        program = torch.export.export(
            network, (images,), dynamic_shapes=(dynamic,), prefer_deferred_runtime_asserts_over_guards=True
        )
    except Exception as error:  # PyTorch's errors have many types
        reason = " ".join(str(error).split())[:300]
        sizes = "images of all sizes" if size is None else f"images of {height}x{width} pixels"
        raise ValueError(
            f"torch.export cannot follow the network for {sizes}: {type(error).__name__}: {reason}"
        ) from error
    graph = program.graph_module
    _drop_equalities(graph)
    if fold:
        _fold_norms(program, {f"network.{name}": value for name, value in predictor.network.state_dict().items()})
    for node in graph.graph.nodes:
        for about in ("stack_trace", "nn_module_stack", "source_fn_stack", "torch_fn"):  # names of files and classes
            node.meta.pop(about, None)
    return _without_unused(program)


def largest_difference(
    run: Callable[[Tensor], Tensor], predictor: Predictor, size: Sequence[int] | None = None
) -> float:
    """How far `run` is from the network on random images, of several sizes or of `size`.

    The largest difference of logits, as a share of the largest logit; or of classes, the share that differs.
    """
    worst = 0.0
    for count, height, width in _OTHERS if size is None else ((1, *size), (3, *size)):
        generator = torch.Generator().manual_seed(height)
        images = 255 * torch.rand(count, 3, height, width, generator=generator, dtype=predictor.mean.dtype)
        with torch.inference_mode():
            logits, found = predictor(images), run(images)
        if found.is_floating_point():
            difference = (found - logits).abs().max() / logits.abs().max()
        else:
            difference = (found != logits.argmax(dim=1)).double().mean()
        worst = max(worst, difference.item())
    return worst


def _drop_equalities(module: GraphModule) -> None:
    for node in module.graph.find_nodes(op="call_function", target=ASSERT_SCALAR):
        condition = node.args[0]
        while isinstance(condition, Node) and condition.target is torch.sym_not:
            condition = condition.args[0]
        if isinstance(condition, Node) and condition.target in (operator.eq, operator.ne):
            module.graph.erase_node(node)
    module.graph.eliminate_dead_code()


def _fold_norms(program: ExportedProgram, unrounded: Mapping[str, Tensor]) -> None:
    """Fold every norm that alone reads a convolution into it, in float64; its shift becomes the convolution's bias."""
    graph, signature = program.graph, program.graph_signature
    names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}

    def weight(node: Any) -> Tensor:
        return unrounded[names[node.name]].cpu().double()

    for norm in graph.find_nodes(op="call_function", target=_ATEN.batch_norm.default):
        conv, scale, shift, mean, var = norm.args[:5]
        if conv.target not in _CONVOLUTIONS or len(conv.users) > 1:
            continue
        kernel, bias = (*conv.args, None)[1:3]
        if any(not isinstance(node, Node) or len(node.users) > 1 for node in (kernel, shift)):  # another layer's too
            continue
        own = weight(kernel), None if bias is None else weight(bias)
        affine = None if scale is None else weight(scale), weight(shift)
        folded = fuse_conv_bn_weights(*own, weight(mean), weight(var), norm.args[7], *affine)
        dtype = kernel.meta["val"].dtype
        for node, values in zip((kernel, shift), folded, strict=True):
            program.state_dict[names[node.name]].data = values.detach().to(dtype).contiguous()
            node.meta["val"] = node.meta["val"].to(dtype)
        conv.args = (conv.args[0], kernel, shift, *conv.args[3:])
        norm.replace_all_uses_with(conv)
        graph.erase_node(norm)


def _without_unused(program: ExportedProgram) -> ExportedProgram:
    """The program without the weights that nothing reads."""
    graph, signature = program.graph, program.graph_signature
    unused = [
        node for node in graph.find_nodes(op="placeholder") if not node.users and node.name not in signature.user_inputs
    ]
    names = {node.name for node in unused}
    for node in unused:
        graph.erase_node(node)
    specs = [spec for spec in signature.input_specs if getattr(spec.arg, "name", None) not in names]
    kept = {spec.target for spec in specs}
    program.graph_module.recompile()
    return ExportedProgram(
        root=program.graph_module,
        graph=graph,
        graph_signature=ExportGraphSignature(specs, signature.output_specs),
        state_dict={name: value for name, value in program.state_dict.items() if name in kept},
        range_constraints=program.range_constraints,
        module_call_graph=program.module_call_graph[:1],
        example_inputs=program.example_inputs,
        constants=program.constants,
        verifiers=program.verifiers,
    )
