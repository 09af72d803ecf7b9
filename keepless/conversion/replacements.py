"""The layers that replace norms, chosen by the module tree. A ValueError says why a norm cannot be replaced."""

import inspect
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from ..norms.abn import ABN
from ..norms.inplace_abn import OWN_LAYERS, InPlaceABN
from ..norms.statistics import BATCH_NORMS
from ..torch_internals import BatchNormBase, LazyNormBase
from .activated import MergedActivation, hand_over, hands_over
from .call_order import CallOrder, Place, is_customised

TENSORS = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
PASSES_ON = (nn.Identity, nn.Flatten, nn.Unflatten)  # their output is their input, or a view of it
KINDS: dict[type[nn.Module], tuple[type[nn.Module], ...]] = {  # norms, and convolutions of as many dimensions
    nn.BatchNorm1d: (nn.Conv1d, nn.ConvTranspose1d),
    nn.BatchNorm2d: (nn.Conv2d, nn.ConvTranspose2d),
    nn.BatchNorm3d: (nn.Conv3d, nn.ConvTranspose3d),
}
Layer = TypeVar("Layer", bound=nn.Module)


class Replacement(NamedTuple):
    """A layer and what replaces it."""

    old: nn.Module
    new: nn.Module
    before: str  # the replaced layers, for the report
    behind: tuple[Place, nn.Module] | None = None  # what goes to the place behind the layer: an activation, or none
    merged: tuple[nn.Module, ...] = ()  # activations that the new layer includes, but that may have other inputs too
    after: str = ""  # PyTorch's layers in place of one of ours, for the report


def own_to_inplace(tree: CallOrder, layer: ABN, relu_slope: float | None) -> Replacement:
    """The in-place layer for one of ours."""
    check_plain(layer, OWN_LAYERS)
    for place in tree.places[layer]:
        _check_output_is_left_alone(tree.following.get(place, []))
    options = {}
    if layer.activation == "relu":
        options = {"activation": "leaky_relu", "activation_param": _slope_for_relu(relu_slope)}
    return Replacement(layer, like(layer, InPlaceABN, **options), f"{type(layer).__name__}({layer.activation})")


def batch_norm_to_inplace(tree: CallOrder, layer: BatchNormBase, relu_slope: float | None) -> Replacement:
    """The in-place layer for a norm of PyTorch and the activation behind it in an `nn.Sequential`."""
    check_batch_norm(layer)
    places = tree.places[layer]
    if len(places) > 1:
        raise ValueError(f"it is registered at {len(places)} places, where different activations may follow")
    if not places or places[0] not in tree.following:
        parent = f", but in {type(places[0].parent).__name__}" if places else ""
        raise ValueError(
            f"it is not in a plain nn.Sequential{parent}: the order of calls is unknown; use InPlaceABN there instead"
        )
    following = tree.following[places[0]]
    if not following:
        raise ValueError("nothing follows it in its nn.Sequential; add an nn.Identity for no activation")
    index = _activation_index(following, relu_slope)
    activation = following[index].module
    name, param = inplace_activation(activation, relu_slope)
    new = inplace_like(layer, name, param)
    _check_output_is_left_alone(following[index + 1 :])
    emptied = None
    if type(activation) is not nn.Identity:
        emptied = following[index], nn.Identity().train(activation.training)
    return Replacement(layer, new, f"{type(layer).__name__} + {type(activation).__name__}", emptied)


def own_to_standard(tree: CallOrder, layer: ABN, kind: type[nn.Module] | None, sync: bool) -> Replacement | None:
    """PyTorch's norm, of a `kind`, and activation for one of our layers; or `ABN`, or None if it is one.

    `sync`: whether a synchronised layer stays synchronised.
    """
    check_plain(layer, OWN_LAYERS)
    sync = sync and layer.sync
    before, kind = f"{type(layer).__name__}({layer.activation})", nn.SyncBatchNorm if sync else kind
    left = MergedActivation if hands_over(layer) else nn.Identity  # by `to_inplace`, behind the layer
    free = tree.following.get(tree.places[layer][0], [])[:1] if len(tree.places[layer]) == 1 else []
    if any(type(p.module) is not left or is_customised(p.module) or len(tree.places[p.module]) > 1 for p in free):
        free = []
    if kind is None or layer.backend not in ("auto", "eager") or (hands_over(layer) and not free):
        is_one = type(layer) is ABN and layer.sync == sync
        return None if is_one else Replacement(layer, like(layer, ABN, sync=sync), before)
    norm = like(layer, kind, **({"process_group": layer.group} if sync else {}))
    activation = _activation_of(layer).train(layer.training)
    after = f"{kind.__name__} + {type(activation).__name__}"
    if free:
        return Replacement(layer, norm, before, (free[0], activation), after=after)
    if layer.activation == "identity":
        return Replacement(layer, norm, before, after=kind.__name__)
    return Replacement(layer, nn.Sequential(norm, activation).train(layer.training), before, after=after)


def unsynchronised(layer: nn.SyncBatchNorm, kind: type[nn.Module] | None) -> Replacement:
    """PyTorch's ordinary norm, of a `kind`, for its synchronised one."""
    check_plain(layer, (nn.SyncBatchNorm,))
    if kind is None:
        raise ValueError("the convolutions of the network do not tell its number of dimensions: it stays synchronised")
    return Replacement(layer, like(layer, kind), "SyncBatchNorm", after=kind.__name__)


def kinds_of(tree: CallOrder) -> dict[nn.Module, type[nn.Module]]:
    """PyTorch's norm for each layer of ours, and each synchronised one of PyTorch.

    Where convolutions, and linear layers of as many channels, agree on one.
    """
    found = {norm for norm, kinds in KINDS.items() if any(isinstance(module, kinds) for module in tree.names)}
    linear = {module.out_features for module in tree.names if isinstance(module, nn.Linear)}
    layers = [layer for layer in tree.names if isinstance(layer, (ABN, nn.SyncBatchNorm))]
    kinds = {layer: found | ({nn.BatchNorm1d} if layer.num_features in linear else set()) for layer in layers}
    return {layer: next(iter(of_layer)) for layer, of_layer in kinds.items() if len(of_layer) == 1}


def check_plain(layer: nn.Module, classes: tuple[type[nn.Module], ...], with_activation: bool = False) -> None:
    """Raise ValueError if another class in place of a layer would lose its customisation.

    `with_activation`: the layer is a subclass with the modules `drop` and `act`, and its forward pass is known.
    """
    if type(layer) not in classes and not with_activation:
        raise ValueError("it is a subclass, whose forward pass may differ")
    if is_customised(layer):
        raise ValueError("it has hooks, which would not run or would see a different output; remove them first")
    known = {*TENSORS, "drop", "act"} if with_activation else {*TENSORS}
    if {*layer._parameters, *layer._buffers, *layer._modules} != known:
        raise ValueError("it has parameters, buffers or modules of its own, which would be lost")


def check_batch_norm(layer: BatchNormBase, with_activation: bool = False) -> None:
    """Raise ValueError if an in-place layer cannot replace a batch normalisation, whatever follows it."""
    if isinstance(layer, LazyNormBase):
        raise ValueError("its number of channels is not known before the first forward pass")
    check_plain(layer, BATCH_NORMS, with_activation)
    dtypes = {values.dtype for name in TENSORS[:4] if (values := getattr(layer, name)) is not None}
    if not (dtypes <= {torch.float32} or dtypes <= {torch.float64}):
        listed = ", ".join(sorted(map(str, dtypes)))
        raise ValueError(f"it holds {listed}: an in-place layer needs float32 parameters; use .float() and autocast")


def _check_output_is_left_alone(following: list[Place]) -> None:
    """The next module must not write over its input, which the in-place layer keeps for the backward pass."""
    for place in following:
        if getattr(place.module, "inplace", False) or getattr(place.module, "overwrite_input", False):
            raise ValueError(
                f"the output is overwritten by the {type(place.module).__name__} that follows, but an in-place layer "
                f"needs it for its backward pass; use inplace=False there"
            )
        if not isinstance(place.module, PASSES_ON):
            return


def _activation_index(following: list[Place], relu_slope: float | None) -> int:
    """Index of a batch normalisation's activation, which may follow Identities (e.g. a disabled dropout)."""
    for index, place in enumerate(following):
        if type(place.module) is not nn.Identity or is_customised(place.module):
            try:
                inplace_activation(place.module, relu_slope)
            except ValueError:
                return 0
            return index
    return 0


def inplace_activation(module: nn.Module, relu_slope: float | None) -> tuple[str, float]:
    """The activation and activation_param of an InPlaceABN that replaces a module."""
    if is_customised(module):
        raise ValueError(f"the {type(module).__name__} that follows has hooks; remove them first")
    if type(module) is nn.LeakyReLU:
        return "leaky_relu", module.negative_slope
    if type(module) is nn.ELU:
        return "elu", module.alpha
    if type(module) is nn.ReLU:
        return "leaky_relu", _slope_for_relu(relu_slope)
    plain = {nn.Identity: "identity", nn.Sigmoid: "sigmoid", nn.Tanh: "tanh"}
    if type(module) in plain:
        return plain[type(module)], 0.01
    raise ValueError(
        f"followed by {type(module).__name__}, not by an activation that an in-place layer computes (LeakyReLU, ELU, "
        f"Sigmoid, Tanh); add an nn.Identity in between for no activation"
    )


def _activation_of(layer: ABN) -> nn.Module:
    name, param = layer.activation, layer.activation_param
    if name in ("leaky_relu", "elu"):
        return nn.ELU(param, inplace=True) if name == "elu" else nn.LeakyReLU(param, inplace=True)
    return {"relu": nn.ReLU(inplace=True), "sigmoid": nn.Sigmoid(), "tanh": nn.Tanh()}.get(name, nn.Identity())


def _slope_for_relu(relu_slope: float | None) -> float:
    if relu_slope is None:
        raise ValueError("a ReLU cannot be inverted; relu_slope=0.01 makes it leaky, but changes the outputs")
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


def inplace_like(layer: BatchNormBase, activation: str, param: float) -> InPlaceABN:
    """An in-place layer with the Parameters, buffers and options of one of PyTorch's, and an activation."""
    return like(
        layer,
        InPlaceABN,
        activation=activation,
        activation_param=param,
        sync=isinstance(layer, nn.SyncBatchNorm),
        group=getattr(layer, "process_group", None),
    )
