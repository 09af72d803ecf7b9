"""Make the layers that replace norms. A ValueError says why a norm cannot be replaced."""

import inspect
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import nn

from ..norms.abn import ABN
from ..norms.backends.activations import Activation
from ..norms.inplace_abn import OWN_LAYERS, InPlaceABN
from ..norms.statistics import BATCH_NORMS
from .activated import ACTIVATIONS, Merged, activation_of, hand_over, hands_over, is_customised, merge
from .readers import KINDS, Calls, activation_after, runs_in_order

TENSORS = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
Layer = TypeVar("Layer", bound=nn.Module)
Places = dict[nn.Module, list[tuple[nn.Module, str]]]  # the parents of each module, and its names there


def in_place_layer(layer: Any, calls: Calls, relu_slope: float | None) -> InPlaceABN:
    """The in-place layer for a norm and the activation that it has, or that follows it in all traced `calls`."""
    _check_plain(layer)
    has_activation = isinstance(layer, ABN) or type(timm_activation(layer)) not in (type(None), nn.Identity)
    if not calls and not has_activation:
        raise ValueError("no traced code calls it")
    following = [activation_after(*call, has_activation) for call in calls]  # modules; None: a convolution
    activation = _included_activation(layer, has_activation, following)
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


def _included_activation(layer: Any, has_activation: bool, following: Sequence[nn.Module | None]) -> Activation:
    """The activation that a norm includes, or else the one that follows it. ValueError: there is no single one."""
    activations = {None if module is None else activation_of(module) for module in following}
    if len(activations) > 1:
        names = ", ".join("a convolution" if module is None else type(module).__name__ for module in following)
        raise ValueError(f"its calls are followed by {names}")
    if isinstance(layer, ABN):
        return Activation(layer.activation, layer.activation_param)
    if not has_activation:
        return activations.pop() or Activation("identity", 0.01)
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


def standard_layer(places: Places, layer: ABN, sync: bool) -> nn.Module | None:
    """PyTorch's norm and activation for one of our layers; or an `ABN`; None if it already is one."""
    _check_plain(layer)
    sync = sync and layer.sync
    following = _place_of_merged(places, layer)
    kind = nn.SyncBatchNorm if sync else kind_of(places, layer)
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


def kind_of(places: Places, layer: nn.Module) -> type[nn.Module] | None:
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
