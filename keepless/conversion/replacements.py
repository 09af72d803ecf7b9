"""Make the layers that replace norms. A ValueError says why a norm cannot be replaced."""

import inspect
from typing import Any, TypeVar

import torch
from torch import nn

from ..norms.abn import ABN
from ..norms.backends.activations import Activation
from ..norms.inplace_abn import OWN_LAYERS, InPlaceABN
from ..norms.statistics import BATCH_NORMS
from .activated import ACTIVATIONS, Merged, activation_of, hand_over, hands_over, is_customised, merge
from .readers import KINDS, NormCall, runs_in_order

TENSORS = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
Layer = TypeVar("Layer", bound=nn.Module)
Places = dict[nn.Module, list[tuple[nn.Module, str]]]  # the parents of each module, and its names there


def in_place(layer: Any, calls: list[NormCall], relu_slope: float | None) -> InPlaceABN:
    """The in-place layer for a norm and the activation that it has, or that follows it in all traced `calls`."""
    _check_plain(layer)
    own = own_activation(layer)
    following: list[nn.Module] = []
    included: Activation | None
    if isinstance(layer, ABN):
        included = Activation(layer.activation, layer.activation_param)
    elif own is not None and type(own) is not nn.Identity:
        included = activation_of(own)
    else:
        following = _following(calls)
        included = activation_of(following[0]) if following else Activation("identity", 0.01)
    if included is None:
        raise ValueError(
            f"it includes {type(own).__name__}, which an in-place layer does not compute, or which has hooks"
        )
    if writer := next((call.writer for call in calls if call.writer), ""):
        raise ValueError(f"{writer} overwrites the output, which an in-place layer keeps: write x = x + y there")
    if included.name == "relu":
        if relu_slope is None:
            raise ValueError("a ReLU cannot be inverted; relu_slope=0.01 makes it leaky, which changes the outputs")
        included = Activation("leaky_relu", relu_slope)
    options: dict[str, Any] = dict(zip(("activation", "activation_param"), included, strict=True))
    if isinstance(layer, nn.SyncBatchNorm):
        options |= {"sync": True, "group": layer.process_group}
    new = like(layer, InPlaceABN, **options)
    for activation in following:
        merge(new, activation)
    return new


def _following(calls: list[NormCall]) -> list[nn.Module]:
    """The activations that alone read the outputs of a norm; none if convolutions do."""
    if not calls:
        raise ValueError("no traced code calls it")
    for call in calls:
        if call.activation is None and not call.before_conv:
            raise ValueError(f"its output goes to {call.names}: expected an activation module alone, or a convolution")
    activations = [call.activation for call in calls if call.activation is not None]
    if 0 < len(activations) < len(calls) or len(set(map(activation_of, activations))) > 1:
        raise ValueError(f"its calls are followed by {', '.join(call.names for call in calls)}")
    return activations


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
    names = list(parent._modules)
    (following,) = names[names.index(name) + 1 :][:1] or [name]
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
