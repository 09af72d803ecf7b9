"""Convert whole networks from standard to in-place layers and back, like `nn.SyncBatchNorm.convert_sync_batchnorm`.

In eval mode all our layers are batch normalisation with the raw weight, so outputs do not change, for any sign of
gamma. Parameters and buffers stay the same objects under the same names, so optimizers and checkpoints keep working.
"""

from collections.abc import Callable
from typing import Any, cast

from torch import Tensor, nn

from ..inputs import Network, check_module
from ..norms.abn import ABN
from ..norms.backends.activations import Activation
from ..norms.inplace_abn import OWN_LAYERS, InPlaceABN
from ..norms.report import ConversionReport, log_report
from ..torch_internals import BatchNormBase
from .activated import MergedActivation, hand_over
from .call_order import CallOrder
from .example import NormsOnExample
from .replacements import Replacement, batch_norm_to_inplace, check_plain, like, own_to_inplace


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
    on_example = None if example is None else NormsOnExample(tree, module, example)

    def replacement_of(layer: nn.Module) -> Replacement | None:
        """The in-place layer for a norm; None for other modules."""
        if isinstance(layer, BatchNormBase):
            if on_example is not None:
                return on_example.batch_norm_to_inplace(layer, relu_slope)
            return batch_norm_to_inplace(tree, layer, relu_slope)
        if isinstance(layer, ABN) and not isinstance(layer, InPlaceABN):
            if on_example is not None:
                return on_example.own_to_inplace(layer, relu_slope)
            return own_to_inplace(tree, layer, relu_slope)
        return None

    return _convert(module, tree, replacement_of, report)


def to_standard(module: Network, *, report: Callable[[ConversionReport], object] = log_report) -> Network:
    """Replace every in-place and checkpointed layer by the standard `ABN`; arguments and result as in `to_inplace`.

    `ABN` has the state dict of PyTorch's batch normalisation. Modules that `to_inplace` merged stay merged.
    """
    check_module(module, "to_standard")

    def replacement_of(layer: nn.Module) -> Replacement | None:
        """The standard layer for one that saves memory; None for other modules."""
        if not isinstance(layer, ABN) or type(layer) is ABN:
            return None
        check_plain(layer, OWN_LAYERS)
        return Replacement(layer, like(layer, ABN), f"{type(layer).__name__}({layer.activation})")

    return _convert(module, CallOrder(module), replacement_of, report)


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
            result.replaced[name] = f"{replacement.before} -> {type(new).__name__}({new.activation})"
    for old, new, _, emptied, merged in replacements:
        for parent, name in tree.places[old]:
            parent.add_module(name, new)
        if emptied is not None:
            emptied.parent.add_module(emptied.name, nn.Identity().train(emptied.module.training))
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
        included = Activation(replacement.new.activation, replacement.new.activation_param)
        for activation in replacement.merged:
            for parent, name in tree.places[activation]:
                if isinstance(parent, MergedActivation):
                    stand_in = parent
                else:
                    stand_in = stand_ins.setdefault(activation, MergedActivation(activation))
                    parent.add_module(name, stand_in)
                stand_in.included = tuple(dict.fromkeys([*stand_in.included, included]))
