"""Convert whole networks from standard to in-place layers and back, like `nn.SyncBatchNorm.convert_sync_batchnorm`.

In eval mode all our layers are batch normalisation with the raw weight, so outputs do not change, for any sign of
gamma. Parameters and buffers stay the same objects, so optimizers keep working; names change in `to_standard` only.
"""

from collections.abc import Callable
from typing import Any, cast

from torch import Tensor, nn

from ..inputs import Network, check_module
from ..norms.abn import ABN
from ..norms.backends.activations import Activation
from ..norms.inplace_abn import InPlaceABN
from ..norms.report import ConversionReport, log_report
from ..torch_internals import BatchNormBase
from . import example as on_example
from .activated import MergedActivation, hand_over
from .call_order import CallOrder
from .replacements import Replacement, batch_norm_to_inplace, kinds_of, own_to_inplace, own_to_standard, unsynchronised


def to_inplace(
    module: Network,
    *,
    relu_slope: float | None = None,
    example: Tensor | tuple[Any, ...] | None = None,
    report: Callable[[ConversionReport], object] = log_report,
) -> Network:
    """Replace standard and checkpointed layers, and PyTorch's batch normalisations, by `InPlaceABN`.

    Our `ABN` and `CheckpointedABN` are replaced everywhere. PyTorch's BatchNorm1d, 2d, 3d and SyncBatchNorm are
    replaced if a LeakyReLU, ELU, Sigmoid, Tanh or Identity directly follows. The new layer takes the name of the batch
    normalisation, and what takes the name of the activation has no parameters: indices and state dicts stay valid.

    Without an example, the order of calls is known in an `nn.Sequential` only, also across the ends of nested ones.
    Code that picks single modules out of it finds the activation in place of the batch normalisation.

    With an example, the network runs on it in training and in evaluation mode, and is left as it was (see
    `calls_on_example`). At every call of a norm, the same activation module must be the only reader of its output. That
    module may also act elsewhere, e.g. after a sum: a `MergedActivation` knows which tensors are activated already. If
    another input takes a path on which the replacement would be wrong, an error is raised. A norm without activation is
    replaced if an operation that keeps its input reads the output. timm's `BatchNormAct2d` is recognised.

    An in-place layer keeps its output. If a forward pass writes over it, as in `x += shortcut`, the backward pass
    raises PyTorch's error about a modified variable; write `x = x + shortcut`. With an example such norms are left.

    Args:
        module: a network, which is changed and returned, or a single layer, for which a new one is returned.
        relu_slope: replace ReLU, which cannot be inverted, by a leaky ReLU with this slope (0.01 in the paper) after
            the replaced norms. This changes the function of the network; its weights are then a starting point.
        example: an input that the network can be trained on, or a tuple of its positional arguments.
        report: called with the `ConversionReport`, e.g. `print` or the append method of a list.

    Raises:
        ValueError: relu_slope is not above 0, or the network does not run on the example.
    """
    if relu_slope is not None and not relu_slope > 0:
        raise ValueError(f"relu_slope={relu_slope}: expected a slope above 0 (0.01 in the paper), or None")
    check_module(module, "to_inplace")
    tree = CallOrder(module)
    calls = None if example is None else on_example.calls_on_example(module, example)

    def replacement_of(layer: nn.Module) -> Replacement | None:
        """The in-place layer for a norm; None for other modules."""
        if isinstance(layer, BatchNormBase):
            if calls is not None:
                return on_example.batch_norm_to_inplace(layer, calls[layer], relu_slope)
            return batch_norm_to_inplace(tree, layer, relu_slope)
        if isinstance(layer, ABN) and not isinstance(layer, InPlaceABN):
            replacement = own_to_inplace(tree, layer, relu_slope)
            if calls is not None:
                on_example.check_output_is_left_alone(calls[layer])
            return replacement
        return None

    return _convert(module, tree, replacement_of, report)


def to_standard(
    module: Network, *, sync: bool = True, report: Callable[[ConversionReport], object] = log_report
) -> Network:
    """Replace every layer of ours by PyTorch's batch normalisation and activation; the contrary of `to_inplace`.

    A network of PyTorch's modules then needs nothing of this package, e.g. to be unpickled. A layer becomes a
    BatchNorm1d, 2d or 3d, as the convolutions of the network tell, or SyncBatchNorm, which needs CUDA to synchronise.
    With `sync=False` synchronised layers, PyTorch's too, become ordinary ones, which `torch.jit.script` can read.

    Where an nn.Identity follows it in an nn.Sequential, as `to_inplace` leaves one, the activation takes its place, and
    the names in the state dict stay. Elsewhere the layer becomes nn.Sequential(norm, activation): `bn.weight` is then
    `bn.0.weight`, so load older state dicts before. Parameters stay the same objects. With `learn_scale=False` the
    norm's weight is None. Code that reads a layer's attributes, such as `bn.activation`, does not find them any more.

    The standard `ABN` remains, under the old names, where PyTorch has no such module: for a fused `backend`, for a norm
    merged with an activation that acts elsewhere too, and where the number of dimensions is unknown (a single layer,
    convolutions of several kinds, linear layers of as many channels). Arguments and result as in `to_inplace`.
    """
    check_module(module, "to_standard")
    tree = CallOrder(module)
    kinds = kinds_of(tree)

    def replacement_of(layer: nn.Module) -> Replacement | None:
        """The standard layers for one of ours, or one that is no longer synchronised; None for other modules."""
        if isinstance(layer, nn.SyncBatchNorm) and not sync:
            return unsynchronised(layer, kinds.get(layer))
        return own_to_standard(tree, layer, kinds.get(layer), sync) if isinstance(layer, ABN) else None

    return _convert(module, tree, replacement_of, report)


def _convert(
    module: Network,
    tree: CallOrder,
    replacement_of: Callable[[nn.Module], Replacement | None],
    report: Callable[[ConversionReport], object],
) -> Network:
    """Find all replacements in the unchanged network, then carry them out."""
    result = ConversionReport()
    replacements: list[Replacement] = []
    for layer, name in tree.names.items():
        try:
            replacement = replacement_of(layer)
        except ValueError as reason:
            result.kept[name] = f"{type(layer).__name__}: {reason}"
            continue
        if replacement is not None:
            replacements.append(replacement)
            new = replacement.new
            after = replacement.after or f"{type(new).__name__}({new.activation})"
            result.replaced[name] = f"{replacement.before} -> {after}"
    for old, new, _, behind, merged, _ in replacements:
        for parent, name in tree.places[old]:
            parent.add_module(name, new)
        if behind is not None:
            behind[0].parent.add_module(behind[0].name, behind[1])
        if merged:
            new.register_forward_hook(hand_over)
        if old is module:
            module = cast(Network, new)  # a single layer becomes one of another type
    _merge(tree, replacements)
    report(result)
    return module


def _merge(tree: CallOrder, replacements: list[Replacement]) -> None:
    """Put a `MergedActivation` wherever an activation is registered that new layers include, or tell the one there."""
    stand_ins: dict[nn.Module, MergedActivation] = {}
    for replacement in replacements:
        for activation in replacement.merged:
            new = cast(ABN, replacement.new)
            included = Activation(new.activation, new.activation_param)
            for parent, name in tree.places[activation]:
                if isinstance(parent, MergedActivation):
                    stand_in = parent
                else:
                    stand_in = stand_ins.setdefault(activation, MergedActivation(activation))
                    parent.add_module(name, stand_in)
                stand_in.included = tuple(dict.fromkeys([*stand_in.included, included]))
