"""Convert whole networks from standard to in-place layers and back, like `nn.SyncBatchNorm.convert_sync_batchnorm`.

In eval mode all our layers are batch normalisation with the raw weight, so outputs do not change, for any sign of
gamma. Parameters and buffers stay the same objects, so optimizers keep working; names change in `to_standard` only.
A ValueError of a function that makes a replacement says why a norm cannot be replaced.
"""

import inspect
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, TypeVar, cast

import torch
from torch import nn

from ..inputs import Network, check_module
from ..norms.abn import ABN
from ..norms.backends.activations import Activation
from ..norms.conversion_report import ConversionReport, log_report
from ..norms.inplace_abn import OWN_LAYERS, InPlaceABN
from ..norms.statistics import BATCH_NORMS
from ..torch_internals import BatchNormBase
from .activated import ACTIVATIONS, Merged, activation_of, hand_over, hands_over, is_customised, merge
from .readers import KINDS, Calls, activation_after, check_not_overwritten, runs_in_order, traced_calls

TENSORS = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
Layer = TypeVar("Layer", bound=nn.Module)
Places = dict[nn.Module, list[tuple[nn.Module, str]]]  # the parents of each module, and its names there
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
            return _in_place_layer(layer, calls[layer], relu_slope)
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
            return _standard_layer(places, layer, sync)
        if sync or type(layer) is not nn.SyncBatchNorm:
            return None
        kind = _kind_of(places, layer)
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


def _in_place_layer(layer: Any, calls: Calls, relu_slope: float | None) -> InPlaceABN:
    """The in-place layer for a norm and the activation that it has, or that follows it in all traced `calls`."""
    _check_plain(layer)
    following: list[nn.Module | None] = []  # modules; None: a convolution
    if isinstance(layer, ABN) or type(timm_activation(layer)) not in (type(None), nn.Identity):
        for call in calls:
            check_not_overwritten(*call)
        activation = _own_activation(layer)
    elif calls:
        following = [activation_after(*call) for call in calls]
        activation = _following_activation(following)
    else:
        raise ValueError("no traced code calls it")
    if activation.name == "relu":
        if relu_slope is None:
            raise ValueError("a ReLU cannot be inverted; relu_slope=0.01 makes it leaky, which changes the outputs")
        activation = Activation("leaky_relu", relu_slope)
    options: dict[str, Any] = {"activation": activation.name, "activation_param": activation.param}
    if isinstance(layer, nn.SyncBatchNorm):
        options |= {"sync": True, "group": layer.process_group}
    new = layer_like(layer, InPlaceABN, **options)
    for module in following:
        if module is not None:
            merge(new, module)
    return new


def _following_activation(modules: Sequence[nn.Module | None]) -> Activation:
    """The activation that these modules after a norm's calls compute; None stands for a convolution.

    ValueError: they differ.
    """
    activations = {None if module is None else activation_of(module) for module in modules}
    if len(activations) > 1:
        names = ", ".join("a convolution" if module is None else type(module).__name__ for module in modules)
        raise ValueError(f"its calls are followed by {names}")
    return activations.pop() or Activation("identity", 0.01)


def _own_activation(layer: Any) -> Activation:
    """The activation of a layer of ours or timm's. ValueError: an in-place layer does not compute it."""
    if isinstance(layer, ABN):
        return Activation(layer.activation, layer.activation_param)
    timms_activation: Any = timm_activation(layer)
    activation = activation_of(timms_activation)
    if activation is None:
        name = type(timms_activation).__name__
        raise ValueError(f"it includes {name}, which an in-place layer does not compute, or which has hooks")
    return activation


def timm_activation(layer: nn.Module) -> nn.Module | None:
    """The activation that timm's `BatchNormAct2d` applies to its result; None for other layers."""
    is_timms = (type(layer).__module__, type(layer).__qualname__) == ("timm.layers.norm_act", "BatchNormAct2d")
    if not is_timms or type(layer.drop) is not nn.Identity or is_customised(layer.drop):
        return None
    return layer._modules["act"]


def _standard_layer(places: Places, layer: ABN, sync: bool) -> nn.Module | None:
    """PyTorch's norm and activation for one of our layers; or an `ABN`; None if it already is one.

    An activation that an nn.Sequential calls after the norm is put back there. The norm is then returned alone.
    """
    _check_plain(layer)
    sync = sync and layer.sync
    following = _place_of_merged(places, layer)
    kind = nn.SyncBatchNorm if sync else _kind_of(places, layer)
    if kind is None or layer.backend not in ("auto", "eager") or (hands_over(layer) and following is None):
        return None if type(layer) is ABN and layer.sync == sync else layer_like(layer, ABN, sync=sync)
    norm = layer_like(layer, kind, **({"process_group": layer.group} if sync else {}))
    if layer.activation == "identity":
        return norm
    activation_class, param = ACTIVATIONS[layer.activation]
    options = {param: layer.activation_param} if param else {}
    options |= {"inplace": True} if "inplace" in inspect.signature(activation_class).parameters else {}
    activation = activation_class(**options).train(layer.training)
    if following is None:
        return nn.Sequential(norm, activation).train(layer.training)
    parent, name = following
    parent.add_module(name, activation)
    return norm


def _place_of_merged(places: Places, layer: ABN) -> tuple[nn.Module, str] | None:
    """The place of the activation that a norm hands over to, if an nn.Sequential calls it after the norm."""
    if not hands_over(layer) or len(places[layer]) != 1:
        return None
    ((parent, name),) = places[layer]
    if not runs_in_order(parent):
        return None
    next_name = dict(pairwise(parent._modules)).get(name, name)
    activation = parent._modules[next_name]
    return (parent, next_name) if isinstance(activation, Merged) and not is_customised(activation) else None


def _kind_of(places: Places, layer: nn.Module) -> type[nn.Module] | None:
    """PyTorch's norm for one of our layers or a SyncBatchNorm, if the network's other layers agree on one.

    These are the convolutions, and the linear layers with as many outputs as the layer has channels.
    """
    kinds = {norm for norm, convs in KINDS.items() if any(isinstance(module, convs) for module in places)}
    linear_widths = {module.out_features for module in places if isinstance(module, nn.Linear)}
    if layer.num_features in linear_widths:
        kinds.add(nn.BatchNorm1d)
    return kinds.pop() if len(kinds) == 1 else None


def _check_plain(layer: nn.Module) -> None:
    """Raise ValueError if replacing a norm would lose its customisation."""
    is_timms = timm_activation(layer) is not None
    if type(layer) not in (*OWN_LAYERS, *BATCH_NORMS) and not is_timms:
        raise ValueError("it is a subclass, whose forward pass may differ")
    if is_customised(layer):
        raise ValueError("it has hooks, which would not run or would see a different output; remove them first")
    expected = {*TENSORS, "drop", "act"} if is_timms else {*TENSORS}
    if {*layer._parameters, *layer._buffers, *layer._modules} != expected:
        raise ValueError("it has parameters, buffers or modules of its own, which would be lost")
    tensors = [getattr(layer, name) for name in TENSORS[:4]]
    dtypes = {tensor.dtype for tensor in tensors if tensor is not None}
    if not (dtypes <= {torch.float32} or dtypes <= {torch.float64}):
        raise ValueError("our layers need parameters of float32 or float64: use .float() and autocast")


def layer_like(layer: nn.Module, cls: type[Layer], **options: Any) -> Layer:
    """A layer of class `cls` with the Parameters, buffers and (unless given) options of another layer."""
    names = [name for name in inspect.signature(cls).parameters if name not in TENSORS]
    previous_options = {name: getattr(layer, name) for name in names if hasattr(layer, name)}
    with torch.device("meta"):  # the constructor's tensors are replaced below
        new = cls(**(previous_options | options))
    for name in TENSORS:
        setattr(new, name, getattr(layer, name))
    new._non_persistent_buffers_set |= layer._non_persistent_buffers_set
    if isinstance(new, ABN) and hands_over(layer):
        new.register_forward_hook(hand_over)
    return new.train(layer.training)
