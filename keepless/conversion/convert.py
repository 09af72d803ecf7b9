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
from ..norms.conversion_report import ConversionReport, listed, log_report
from ..norms.inplace_abn import InPlaceABN
from ..torch_internals import BatchNormBase
from .activated import MergedActivation, hand_over
from .example import calls_on_example
from .replacements import (
    Places,
    Replacement,
    batch_norm_to_inplace,
    kinds_of,
    own_to_inplace,
    own_to_standard,
    places_of,
    unsynchronised,
)


def to_inplace(
    module: Network,
    *,
    relu_slope: float | None = None,
    example: Tensor | tuple[Any, ...] | None = None,
    report: Callable[[ConversionReport], object] = log_report,
) -> Network:
    """Replace standard and checkpointed layers, and PyTorch's batch normalisations, by `InPlaceABN`.

    Our `ABN` and `CheckpointedABN` need no example; PyTorch's BatchNorm1d, 2d, 3d and SyncBatchNorm are replaced only
    with an example. The network runs on it in training and in evaluation mode, without side effects (see
    `calls_on_example`). At every call of a norm, the same LeakyReLU, ELU, Sigmoid or Tanh module must be the only
    reader of its output. That module may also be called elsewhere, e.g. after a sum: a `MergedActivation` in its place
    knows which tensors are already activated. If another input takes a path on which the replacement would be wrong, an
    error is raised. A norm without activation is replaced if an operation that keeps its input reads the output. timm's
    `BatchNormAct2d` is recognised. Names in the state dict stay the same.

    An in-place layer keeps its output. If a forward pass writes over it, as in `x += shortcut`, the backward pass
    raises PyTorch's error about a modified variable; write `x = x + shortcut`. If this happens on the example, the norm
    is not replaced.

    Args:
        module: a network, which is changed and returned, or a single layer, for which a new one is returned.
        relu_slope: replace ReLU, which cannot be inverted, by a leaky ReLU with this slope (0.01 in the paper) after
            the replaced norms. This changes what the network computes; fine-tune it.
        example: an input that the network can be trained on, or a tuple of its positional arguments.
        report: called with the `ConversionReport`, e.g. `print` or the append method of a list.

    Raises:
        ValueError: relu_slope is not above 0; the network has PyTorch's norms, but no example is given, or it does not
            run on the example.
    """
    if relu_slope is not None and not relu_slope > 0:
        raise ValueError(f"relu_slope={relu_slope}: expected a slope above 0 (0.01 in the paper), or None")
    check_module(module, "to_inplace")
    norms = [name or "the module itself" for name, one in module.named_modules() if isinstance(one, BatchNormBase)]
    if norms and example is None:
        raise ValueError(
            f"the network has PyTorch's batch normalisations ({listed(norms)}): give to_inplace an example=, an input "
            f"of the network, which shows what reads their outputs"
        )
    calls = {} if example is None else calls_on_example(module, example)

    def replacement_of(layer: nn.Module) -> Replacement | None:
        """The in-place layer for a norm; None for other modules."""
        if isinstance(layer, BatchNormBase):
            return batch_norm_to_inplace(layer, calls[layer], relu_slope)
        if isinstance(layer, ABN) and not isinstance(layer, InPlaceABN):
            return own_to_inplace(layer, calls.get(layer, []), relu_slope)
        return None

    return _convert(module, places_of(module), replacement_of, report)


def to_standard(
    module: Network, *, sync: bool = True, report: Callable[[ConversionReport], object] = log_report
) -> Network:
    """Replace all our layers by PyTorch's batch normalisation and activation; the reverse of `to_inplace`.

    A network of PyTorch's modules then does not need this package, e.g. to be unpickled. A layer becomes a
    BatchNorm1d, 2d or 3d, depending on the network's convolutions, or SyncBatchNorm, which needs CUDA to synchronise.
    With `sync=False` synchronised layers, also PyTorch's, become ordinary ones, which `torch.jit.script` can read.

    If `to_inplace` merged an activation with one norm, and an nn.Sequential calls it right after the norm, it is put
    back, and names in the state dict stay. Other layers with an activation become a Sequential of norm and
    activation: `bn.weight` becomes `bn.0.weight`, so load older state dicts first. Parameters stay the same objects.
    With `learn_scale=False` the norm's weight is None. Code that reads a layer's attributes, such as `bn.activation`,
    no longer finds them.

    Our standard `ABN` remains, under the old names, where PyTorch has no such module: for a fused `backend`, for other
    norms that `to_inplace` merged with an activation, which may be called elsewhere too, and if the number of
    dimensions is unknown (a single layer, convolutions of several kinds, linear layers with the same number of
    channels). Arguments and result as in `to_inplace`.
    """
    check_module(module, "to_standard")
    places, kinds = places_of(module), kinds_of(module)

    def replacement_of(layer: nn.Module) -> Replacement | None:
        """The standard layers for one of ours, or one that is no longer synchronised; None for other modules."""
        if isinstance(layer, nn.SyncBatchNorm) and not sync:
            return unsynchronised(layer, kinds.get(layer))
        return own_to_standard(places, layer, kinds.get(layer), sync) if isinstance(layer, ABN) else None

    return _convert(module, places, replacement_of, report)


def _convert(
    module: Network,
    places: Places,
    replacement_of: Callable[[nn.Module], Replacement | None],
    report: Callable[[ConversionReport], object],
) -> Network:
    """Find all replacements in the unchanged network, then carry them out."""
    result = ConversionReport()
    replacements: list[Replacement] = []
    for name, layer in module.named_modules():
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
        for one, other in ((old, new), *behind):
            for parent, name in places[one]:
                parent.add_module(name, other)
        if merged:
            new.register_forward_hook(hand_over)
        if old is module:
            module = cast(Network, new)  # a single layer becomes one of another type
    _merge(places, replacements)
    report(result)
    return module


def _merge(places: Places, replacements: list[Replacement]) -> None:
    """Put a `MergedActivation` wherever an activation that new layers include is registered, or extend an old one."""
    stand_ins: dict[nn.Module, MergedActivation] = {}
    for replacement in replacements:
        for activation in replacement.merged:
            new = cast(ABN, replacement.new)
            included = Activation(new.activation, new.activation_param)
            for parent, name in places[activation]:
                if isinstance(parent, MergedActivation):
                    stand_in = parent
                else:
                    stand_in = stand_ins.setdefault(activation, MergedActivation(activation))
                    parent.add_module(name, stand_in)
                stand_in.included = tuple(dict.fromkeys([*stand_in.included, included]))
