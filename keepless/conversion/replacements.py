"""Make the layers that replace norms. A ValueError says why a norm cannot be replaced."""

import inspect
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


def in_place(layer: Any, calls: Calls, relu_slope: float | None) -> InPlaceABN:
    """The in-place layer for a norm and the activation that it has, or that follows it in all traced `calls`."""
    _check_plain(layer)
    own: Any = own_activation(layer)
    includes = isinstance(layer, ABN) or type(own) not in (type(None), nn.Identity)
    if not calls and not includes:
        raise ValueError("no traced code calls it")
    following = [activation_after(*call, includes) for call in calls]
    kinds = {None if one is None else activation_of(one) for one in following}
    if len(kinds) > 1:
        names = ", ".join("a convolution" if one is None else type(one).__name__ for one in following)
        raise ValueError(f"its calls are followed by {names}")
    activation: Activation | None
    if isinstance(layer, ABN):
        activation = Activation(layer.activation, layer.activation_param)
    elif includes:
        activation = activation_of(own)
    else:
        activation = kinds.pop() or Activation("identity", 0.01)
    if activation is None:
        name = type(own).__name__
        raise ValueError(f"it includes {name}, which an in-place layer does not compute, or which has hooks")
    if activation.name == "relu":
        if relu_slope is None:
            raise ValueError("a ReLU cannot be inverted; relu_slope=0.01 makes it leaky, which changes the outputs")
        activation = Activation("leaky_relu", relu_slope)
    options: dict[str, Any] = {"activation": activation.name, "activation_param": activation.param}
    if isinstance(layer, nn.SyncBatchNorm):
        options |= {"sync": True, "group": layer.process_group}
    new = like(layer, InPlaceABN, **options)
    for one in following:
        if one is not None:
            merge(new, one)
    return new


def own_activation(layer: nn.Module) -> nn.Module | None:
    """The activation that timm's `BatchNormAct2d` applies to its result; None for other layers."""
    is_timms = (type(layer).__module__, type(layer).__qualname__) == ("timm.layers.norm_act", "BatchNormAct2d")
    if not is_timms or type(layer.drop) is not nn.Identity or is_customised(layer.drop):
        return None
    return layer._modules["act"]


def own_to_standard(places: Places, layer: ABN, sync: bool) -> nn.Module | None:
    """PyTorch's norm and activation for one of our layers; or an `ABN`; None if it already is one."""
    _check_plain(layer)
    sync, following = sync and layer.sync, _merged_behind(places, layer)
    kind = nn.SyncBatchNorm if sync else kind_of(places, layer)
    if kind is None or layer.backend not in ("auto", "eager") or (hands_over(layer) and following is None):
        return None if type(layer) is ABN and layer.sync == sync else like(layer, ABN, sync=sync)
    norm = like(layer, kind, **({"process_group": layer.group} if sync else {}))
    if layer.activation == "identity":
        return norm
    of_activation, param = ACTIVATIONS[layer.activation]
    options = {param: layer.activation_param} if param else {}
    options |= {"inplace": True} if "inplace" in inspect.signature(of_activation).parameters else {}
    activation = of_activation(**options).train(layer.training)
    if following is None:
        return nn.Sequential(norm, activation).train(layer.training)
    parent, name = following
    parent.add_module(name, activation)
    return norm


def _merged_behind(places: Places, layer: ABN) -> tuple[nn.Module, str] | None:
    """The place of the activation that a norm hands over to, if an nn.Sequential calls it after the norm."""
    if not hands_over(layer) or len(places[layer]) != 1 or not runs_in_order(places[layer][0][0]):
        return None
    ((parent, name),) = places[layer]
    following = dict(pairwise(parent._modules)).get(name, name)
    activation = parent._modules[following]
    return (parent, following) if isinstance(activation, Merged) and not is_customised(activation) else None


def kind_of(places: Places, layer: nn.Module) -> type[nn.Module] | None:
    """PyTorch's norm for one of our layers or a SyncBatchNorm, if the network's other layers agree on one.

    These are the convolutions, and the linear layers with as many outputs as the layer has channels.
    """
    kinds = {norm for norm, convs in KINDS.items() if any(isinstance(one, convs) for one in places)}
    linear = {one.out_features for one in places if isinstance(one, nn.Linear)}
    kinds |= {nn.BatchNorm1d} if layer.num_features in linear else set()
    return kinds.pop() if len(kinds) == 1 else None


def _check_plain(layer: nn.Module) -> None:
    """Raise ValueError if replacing a norm would lose its customisation."""
    has_own = own_activation(layer) is not None
    if type(layer) not in (*OWN_LAYERS, *BATCH_NORMS) and not has_own:
        raise ValueError("it is a subclass, whose forward pass may differ")
    if is_customised(layer):
        raise ValueError("it has hooks, which would not run or would see a different output; remove them first")
    if {*layer._parameters, *layer._buffers, *layer._modules} != {*TENSORS, *(("drop", "act") if has_own else ())}:
        raise ValueError("it has parameters, buffers or modules of its own, which would be lost")
    dtypes = {values.dtype for name in TENSORS[:4] if (values := getattr(layer, name)) is not None}
    if not (dtypes <= {torch.float32} or dtypes <= {torch.float64}):
        raise ValueError("our layers need parameters of float32 or float64: use .float() and autocast")


def like(layer: nn.Module, cls: type[Layer], **options: Any) -> Layer:
    """A layer of class `cls` with the Parameters, buffers and (unless given) options of another layer."""
    names = [name for name in inspect.signature(cls).parameters if name not in TENSORS]
    given = {name: getattr(layer, name) for name in names if hasattr(layer, name)}
    with torch.device("meta"):  # the constructor's tensors are replaced below
        new = cls(**(given | options))
    for name in TENSORS:
        setattr(new, name, getattr(layer, name))
    new._non_persistent_buffers_set |= layer._non_persistent_buffers_set
    if isinstance(new, ABN) and hands_over(layer):
        new.register_forward_hook(hand_over)
    return new.train(layer.training)
