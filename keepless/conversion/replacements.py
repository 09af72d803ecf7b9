"""Make the layers that replace norms. A ValueError says why a norm cannot be replaced."""

import inspect
from collections.abc import Iterable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from ..norms.abn import ABN
from ..norms.backends.activations import Activation
from ..norms.inplace_abn import OWN_LAYERS, InPlaceABN
from ..norms.statistics import BATCH_NORMS
from ..torch_internals import BatchNormBase
from .activated import MergedActivation, hand_over, hands_over, is_customised
from .example import ACTIVATIONS, NormCall, Reader

TENSORS = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
KINDS: dict[type[nn.Module], tuple[type[nn.Module], ...]] = {  # norms, and convolutions of as many dimensions
    nn.BatchNorm1d: (nn.Conv1d, nn.ConvTranspose1d),
    nn.BatchNorm2d: (nn.Conv2d, nn.ConvTranspose2d),
    nn.BatchNorm3d: (nn.Conv3d, nn.ConvTranspose3d),
}
ACTIVATION_FUNCTIONS = ("relu", "leaky_relu", "elu", "sigmoid", "tanh")
# Functions that keep their input for the backward pass, so that an in-place layer before them keeps nothing more.
KEEP_INPUT = {
    *(f"{kind}{dims}d" for kind in ("conv", "conv_transpose", "max_pool", "avg_pool") for dims in (1, 2, 3)),
    *("linear", "matmul", "adaptive_avg_pool2d", "layer_norm", "group_norm"),
    *("silu", "gelu", "mish", "hardtanh", "relu6", "hardswish", "prelu"),
}
Layer = TypeVar("Layer", bound=nn.Module)
Places = dict[nn.Module, list[tuple[nn.Module, str]]]  # the parents of each module, and its names there


class Replacement(NamedTuple):
    """A layer and its replacement."""

    old: nn.Module
    new: nn.Module
    before: str  # the replaced layers, for the report
    behind: tuple[tuple[nn.Module, nn.Module], ...] = ()  # an activation after it, and its replacement
    merged: tuple[nn.Module, ...] = ()  # activations that the new layer includes, but that may have other inputs too
    after: str = ""  # PyTorch's layers in place of one of ours, for the report


def places_of(network: nn.Module) -> Places:
    """Where a network and its modules are registered."""
    places: Places = {module: [] for module in network.modules()}
    for parent in places:
        for name, child in parent._modules.items():
            if child is not None:
                places[child].append((parent, name))
    return places


def own_to_inplace(layer: ABN, calls: list[NormCall], relu_slope: float | None) -> Replacement:
    """The in-place layer for one of ours. `calls`: on the example; empty without an example."""
    check_plain(layer, OWN_LAYERS)
    _check_output_is_left_alone(calls)
    options = {}
    if layer.activation == "relu":
        options = {"activation": "leaky_relu", "activation_param": _slope_for_relu(relu_slope)}
    return Replacement(layer, like(layer, InPlaceABN, **options), f"{type(layer).__name__}({layer.activation})")


def batch_norm_to_inplace(layer: BatchNormBase, calls: list[NormCall], relu_slope: float | None) -> Replacement:
    """The in-place layer for PyTorch's norm and the activation that followed it in all `calls` on the example."""
    if not calls:
        raise ValueError("it was not called on the example")
    own = own_activation(layer)
    check_plain(layer, BATCH_NORMS, with_activation=own is not None)
    dtypes = {values.dtype for name in TENSORS[:4] if (values := getattr(layer, name)) is not None}
    if not (dtypes <= {torch.float32} or dtypes <= {torch.float64}):
        listed = ", ".join(sorted(map(str, dtypes)))
        raise ValueError(f"it holds {listed}: an in-place layer needs float32 parameters; use .float() and autocast")
    if own is not None and type(own) not in (*ACTIVATIONS, nn.Identity):
        raise ValueError(f"it includes {type(own).__name__}, an activation that an in-place layer does not compute")
    merged: tuple[nn.Module, ...] = ()
    if own is None or type(own) is nn.Identity:
        merged = _followers(calls)
    activation = own if own is not None and not merged else (*merged, nn.Identity())[0]
    name, param = _inplace_activation(activation, relu_slope)
    if any(_inplace_activation(other, relu_slope) != (name, param) for other in merged):
        raise ValueError(f"different activations follow its calls: {', '.join(_names(merged))}")
    new = like(
        layer,
        InPlaceABN,
        activation=name,
        activation_param=param,
        sync=isinstance(layer, nn.SyncBatchNorm),
        group=getattr(layer, "process_group", None),
    )
    if name == "identity":
        _check_readers_of_identity(calls)
    else:
        _check_output_is_left_alone(calls)
    included = f" + {type(activation).__name__}" if merged or own is not None else ""
    return Replacement(layer, new, f"{type(layer).__name__}{included}", merged=merged)


def own_activation(layer: nn.Module) -> nn.Module | None:
    """The activation that timm's `BatchNormAct2d` applies to its result; None for other layers."""
    is_timms = (type(layer).__module__, type(layer).__qualname__) == ("timm.layers.norm_act", "BatchNormAct2d")
    if not is_timms or type(layer.drop) is not nn.Identity or is_customised(layer.drop):
        return None
    return layer._modules["act"]


def _followers(calls: list[NormCall]) -> tuple[nn.Module, ...]:
    """The activation modules that follow the calls, each the only reader of an output; empty without activation."""
    for call in calls:
        if call.activations and call.writer in call.readers:  # e.g. a sum in place, then the activation
            _check_output_is_left_alone([call])
        readers: list[nn.Module | Reader | str] = [*call.activations, *call.readers]
        if call.is_returned:
            readers.append("the caller of the network")
        if call.activations and len(readers) > 1:
            raise ValueError(f"its output has several readers: {', '.join(_names(readers))}")
    followed = [call for call in calls if call.activations]
    if followed and len(followed) < len(calls):
        names = [name for call in calls for name in _names([*call.activations, *call.readers])]
        raise ValueError(
            f"an activation follows only some of its calls; they are followed by {', '.join(dict.fromkeys(names))}"
        )
    return tuple(dict.fromkeys(call.activations[0] for call in followed))


def _check_readers_of_identity(calls: list[NormCall]) -> None:
    """Raise ValueError if an in-place layer without activation would be wrong, or would save no memory."""
    readers = [reader for call in calls for reader in call.readers]
    for reader in readers:
        if type(reader.module) in ACTIVATIONS and is_customised(reader.module):
            raise ValueError(f"the {reader} that follows has hooks; remove them first")
        if reader.function.rstrip("_") in ACTIVATION_FUNCTIONS and not reader.is_layer:
            raise ValueError(
                f"the function {reader} follows, but only modules can be replaced; recompute_activations works with "
                f"functions"
            )
    if any(call.is_returned for call in calls):
        raise ValueError("the network returns its output, which may then be overwritten")
    _check_output_is_left_alone(calls)
    if not any(reader.function in KEEP_INPUT for reader in readers):
        names = ", ".join(dict.fromkeys(_names(readers))) or "nothing"
        raise ValueError(f"an in-place layer would save no memory: its output goes to {names}, which does not keep it")


def _check_output_is_left_alone(calls: list[NormCall]) -> None:
    """Raise ValueError if something overwrites the output of a norm on the example."""
    for call in calls:
        if call.writer is None:
            continue
        if not call.activations and type(call.writer.module).__module__ == nn.ReLU.__module__:
            raise ValueError(
                f"followed by {call.writer}, which an in-place layer cannot include, and which overwrites the output "
                f"that the layer needs for its backward pass; use inplace=False there"
            )
        raise ValueError(
            f"the output is overwritten by {call.writer}, but an in-place layer needs it for its backward pass; "
            f"write `x = x + y` or use inplace=False there"
        )


def _names(readers: Iterable[nn.Module | Reader | str]) -> list[str]:
    return [type(reader).__name__ if isinstance(reader, nn.Module) else str(reader) for reader in readers]


def own_to_standard(places: Places, layer: ABN, kind: type[nn.Module] | None, sync: bool) -> Replacement | None:
    """PyTorch's norm (a `kind`) and activation for one of our layers; or an `ABN`; None if it already is one.

    `sync`: whether a synchronised layer stays synchronised.
    """
    check_plain(layer, OWN_LAYERS)
    sync = sync and layer.sync
    before, kind = f"{type(layer).__name__}({layer.activation})", nn.SyncBatchNorm if sync else kind
    behind = _merged_behind(places, layer)
    if kind is None or layer.backend not in ("auto", "eager") or (hands_over(layer) and behind is None):
        is_one = type(layer) is ABN and layer.sync == sync
        return None if is_one else Replacement(layer, like(layer, ABN, sync=sync), before)
    norm = like(layer, kind, **({"process_group": layer.group} if sync else {}))
    if layer.activation == "identity":
        return Replacement(layer, norm, before, after=kind.__name__)
    activation = _activation_of(layer).train(layer.training)
    after = f"{kind.__name__} + {type(activation).__name__}"
    if behind is not None:
        return Replacement(layer, norm, before, ((behind, activation),), after=after)
    return Replacement(layer, nn.Sequential(norm, activation).train(layer.training), before, after=after)


def _merged_behind(places: Places, layer: ABN) -> MergedActivation | None:
    """The `MergedActivation` that a plain nn.Sequential calls next, if it is only for this layer."""
    if not hands_over(layer) or len(places[layer]) != 1:
        return None
    parent, name = places[layer][0]
    if type(parent).forward is not nn.Sequential.forward or "forward" in vars(parent):
        return None
    names = list(parent._modules)
    index = names.index(name) + 1
    following = parent._modules[names[index]] if index < len(names) else None
    if not isinstance(following, MergedActivation) or is_customised(following):
        return None
    own = Activation(layer.activation, layer.activation_param)
    return following if len(places[following]) == 1 and following.included == (own,) else None


def unsynchronised(layer: nn.SyncBatchNorm, kind: type[nn.Module] | None) -> Replacement:
    """PyTorch's ordinary norm (a `kind`) for its synchronised one."""
    check_plain(layer, (nn.SyncBatchNorm,))
    if kind is None:
        raise ValueError("the network's convolutions do not show its number of dimensions: it stays synchronised")
    return Replacement(layer, like(layer, kind), "SyncBatchNorm", after=kind.__name__)


def kinds_of(network: nn.Module) -> dict[nn.Module, type[nn.Module]]:
    """PyTorch's norm for each of our layers and each SyncBatchNorm.

    Only if the network's convolutions, and linear layers with as many outputs as the layer has channels, agree on one.
    """
    modules = list(network.modules())
    found = {norm for norm, kinds in KINDS.items() if any(isinstance(module, kinds) for module in modules)}
    linear = {module.out_features for module in modules if isinstance(module, nn.Linear)}
    layers = [layer for layer in modules if isinstance(layer, (ABN, nn.SyncBatchNorm))]
    kinds = {layer: found | ({nn.BatchNorm1d} if layer.num_features in linear else set()) for layer in layers}
    return {layer: next(iter(of_layer)) for layer, of_layer in kinds.items() if len(of_layer) == 1}


def check_plain(layer: nn.Module, classes: tuple[type[nn.Module], ...], with_activation: bool = False) -> None:
    """Raise ValueError if replacing a layer would lose its customisation.

    `with_activation`: the layer is a subclass with the modules `drop` and `act`, and its forward pass is known.
    """
    if type(layer) not in classes and not with_activation:
        raise ValueError("it is a subclass, whose forward pass may differ")
    if is_customised(layer):
        raise ValueError("it has hooks, which would not run or would see a different output; remove them first")
    known = {*TENSORS, "drop", "act"} if with_activation else {*TENSORS}
    if {*layer._parameters, *layer._buffers, *layer._modules} != known:
        raise ValueError("it has parameters, buffers or modules of its own, which would be lost")


def _inplace_activation(module: nn.Module, relu_slope: float | None) -> tuple[str, float]:
    """The activation and activation_param of an InPlaceABN that includes one of ACTIVATIONS or an nn.Identity."""
    if is_customised(module):
        raise ValueError(f"the {type(module).__name__} that follows has hooks; remove them first")
    if type(module) is nn.LeakyReLU:
        return "leaky_relu", module.negative_slope
    if type(module) is nn.ELU:
        return "elu", module.alpha
    if type(module) is nn.ReLU:
        return "leaky_relu", _slope_for_relu(relu_slope)
    return {nn.Identity: "identity", nn.Sigmoid: "sigmoid", nn.Tanh: "tanh"}[type(module)], 0.01


def _activation_of(layer: ABN) -> nn.Module:
    name, param = layer.activation, layer.activation_param
    if name in ("leaky_relu", "elu"):
        return nn.ELU(param, inplace=True) if name == "elu" else nn.LeakyReLU(param, inplace=True)
    return {"relu": nn.ReLU(inplace=True), "sigmoid": nn.Sigmoid(), "tanh": nn.Tanh()}.get(name, nn.Identity())


def _slope_for_relu(relu_slope: float | None) -> float:
    if relu_slope is None:
        raise ValueError("a ReLU cannot be inverted; relu_slope=0.01 makes it leaky, which changes the outputs")
    return relu_slope


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
