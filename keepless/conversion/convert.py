"""Convert whole networks from standard to in-place layers and back, like `nn.SyncBatchNorm.convert_sync_batchnorm`.

In eval mode all our layers are batch normalisation with the raw weight, so outputs do not change, for any sign of
gamma. Parameters and buffers stay the same objects, so optimizers keep working; names change in `to_standard` only.
"""

from collections.abc import Callable
from typing import Any, cast

from torch import nn

from ..inputs import Network, check_module
from ..norms.abn import ABN
from ..norms.conversion_report import ConversionReport, log_report
from ..norms.inplace_abn import InPlaceABN
from ..torch_internals import BatchNormBase
from .readers import traced_calls
from .replacements import Places, in_place_layer, kind_of, layer_like, standard_layer

Report = Callable[[ConversionReport], object]


def to_inplace(module: Network, *, relu_slope: float | None = None, report: Report = log_report) -> Network:
    """Replace standard and checkpointed layers, and PyTorch's batch normalisations, by `InPlaceABN`.

    A symbolic trace (`torch.fx`) shows what reads the outputs of PyTorch's BatchNorm1d, 2d, 3d and SyncBatchNorm. A
    norm is replaced if, in all its calls, the same LeakyReLU, ELU, Sigmoid or Tanh alone reads its output, or a
    convolution does; timm's `BatchNormAct2d` has its activation. The activation's module stays, because it may be
    called for sums too, and passes on what the norm has activated; on a path that was not traced an error is raised.
    Of a network that cannot be traced, norms are replaced whose activation or convolution follows in an nn.Sequential.
    Names in the state dict stay the same.

    An in-place layer keeps its output: if a forward pass writes over a view of it, the backward pass raises PyTorch's
    error about a modified variable.

    Args:
        module: a network, which is changed and returned, or a single layer, for which a new one is returned.
        relu_slope: replace ReLU, which cannot be inverted, by a leaky ReLU with this slope (0.01 in the paper) after
            the replaced norms. This changes what the network computes; fine-tune it.
        report: called with the `ConversionReport`, which says why norms were left; e.g. `print`.

    ValueError: relu_slope is not above 0.
    """
    if relu_slope is not None and not relu_slope > 0:
        raise ValueError(f"relu_slope={relu_slope}: expected a slope above 0 (0.01 in the paper), or None")
    check_module(module, "to_inplace")
    calls, untraced = traced_calls(module)

    def replacement_for(places: Places, layer: nn.Module) -> nn.Module | None:
        if isinstance(layer, (ABN, BatchNormBase)) and not isinstance(layer, InPlaceABN):
            return in_place_layer(layer, calls[layer], relu_slope)
        return None

    remark = f"; the network cannot be traced ({untraced})" if untraced else ""
    return _replace_layers(module, replacement_for, report, remark)


def to_standard(module: Network, *, sync: bool = True, report: Report = log_report) -> Network:
    """Replace all our layers by PyTorch's batch normalisation and activation; the reverse of `to_inplace`.

    A network of PyTorch's modules then does not need this package, e.g. to be unpickled. A layer becomes a
    BatchNorm1d, 2d or 3d, depending on the network's convolutions, or SyncBatchNorm, which needs CUDA to synchronise.
    With `sync=False` synchronised layers, also PyTorch's, become ordinary ones, which `torch.jit.script` can read.

    An activation that an nn.Sequential calls right after the norm that includes it acts again, and names in the state
    dict stay. Other layers with an activation become a Sequential of norm and activation: `bn.weight` becomes
    `bn.0.weight`, so load older state dicts first. Parameters stay the same objects. With `learn_scale=False` the
    norm's weight is None. Code that reads a layer's attributes, such as `bn.activation`, no longer finds them.

    Our standard `ABN` remains, under the old names, where PyTorch has no such module: for a fused `backend`, for other
    norms whose activation is called afterwards, and if the number of dimensions is unknown (a single layer,
    convolutions of several kinds, linear layers with the same number of channels).
    """
    check_module(module, "to_standard")

    def replacement_for(places: Places, layer: nn.Module) -> nn.Module | None:
        if isinstance(layer, ABN):
            return standard_layer(places, layer, sync)
        if sync or type(layer) is not nn.SyncBatchNorm:
            return None
        kind = kind_of(places, layer)
        if kind is None:
            raise ValueError("the network's convolutions do not show its number of dimensions: it stays synchronised")
        return layer_like(layer, kind)

    return _replace_layers(module, replacement_for, report)


def _replace_layers(
    module: Network,
    replacement_for: Callable[[Places, nn.Module], nn.Module | None],
    report: Report,
    remark: str = "",
) -> Network:
    """Replace each layer that has a replacement, and return the module, or the replacement of a single layer.

    `remark`: added to the reasons why others were kept.
    """
    conversion = ConversionReport()
    root = module
    places: Places = {part: [] for part in module.modules()}
    for parent in places:
        for name, child in parent._modules.items():
            if child is not None:
                places[child].append((parent, name))
    for name, layer in list(module.named_modules()):
        try:
            replacement = replacement_for(places, layer)
        except ValueError as reason:
            conversion.kept[name] = f"{type(layer).__name__}: {reason}{remark}"
            continue
        if replacement is None:
            continue
        conversion.replaced[name] = f"{_layer_text(layer)} -> {_layer_text(replacement)}"
        for parent, child_name in places[layer]:
            parent.add_module(child_name, replacement)
        if layer is module:
            root = cast(Network, replacement)  # a single layer becomes one of another type
    report(conversion)
    return root


def _layer_text(layer: Any) -> str:
    if isinstance(layer, nn.Sequential):
        return " + ".join(map(_layer_text, layer))
    return f"{type(layer).__name__}({layer.activation})" if isinstance(layer, ABN) else type(layer).__name__
