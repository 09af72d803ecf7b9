"""Which layer replaces a norm, by what followed its calls on an example; a ValueError says why none does."""

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from models.call_order import CallOrder, is_customised
from models.layers import ABN, InPlaceABN
from models.replacements import (
    BATCH_NORMS,
    STATE,
    Replacement,
    batch_norm_like,
    check_batch_norm,
    inplace_activation,
    own_to_inplace,
)
from models.traced_calls import NormCall, Reader, traced_calls

ACTIVATIONS = (nn.ReLU, nn.LeakyReLU, nn.ELU, nn.Sigmoid, nn.Tanh)
ACTIVATION_FUNCTIONS = ("relu", "leaky_relu", "elu", "sigmoid", "tanh")
# Functions that keep their input for the backward pass, so that an in-place layer before them keeps nothing more.
KEEP_INPUT = {
    *(f"{kind}{dims}d" for kind in ("conv", "conv_transpose", "max_pool", "avg_pool") for dims in (1, 2, 3)),
    *("linear", "matmul", "adaptive_avg_pool2d", "layer_norm", "group_norm"),
    *("silu", "gelu", "mish", "hardtanh", "relu6", "hardswish", "prelu"),
}


class TracedNorms:
    """The norms of a network and their calls on an example, see `traced_calls`."""

    def __init__(self, tree: CallOrder, network: nn.Module, example: Any):
        self.tree = tree
        norms = [module for module in tree.names if isinstance(module, (_BatchNorm, ABN))]
        activations = {module for module in tree.names if type(module) in ACTIVATIONS and not is_customised(module)}
        self.calls = traced_calls(network, example, norms, activations, _twin)

    def own_to_inplace(self, layer: ABN, relu_slope: float | None) -> Replacement:
        replacement = own_to_inplace(self.tree, layer, relu_slope)
        _check_output_is_left_alone(self.calls[layer])
        return replacement

    def batch_norm_to_inplace(self, layer: _BatchNorm, relu_slope: float | None) -> Replacement:
        calls = self.calls[layer]
        if not calls:
            raise ValueError("it was not called on the example")
        own = _own_activation(layer)
        check_batch_norm(layer, with_activation=own is not None)
        if own is not None and type(own) not in (*ACTIVATIONS, nn.Identity):
            raise ValueError(f"it includes {type(own).__name__}, an activation that an in-place layer does not compute")
        if not all(call.does_as_twin for call in calls):
            raise ValueError(
                "it is a subclass, whose forward pass on the example was not seen to be just the norm, then `act`"
            )
        merged: tuple[nn.Module, ...] = ()
        if own is None or type(own) is nn.Identity:
            merged = _followers(calls)
        activation = own if own is not None and not merged else (*merged, nn.Identity())[0]
        name, param = inplace_activation(activation, relu_slope)
        if any(inplace_activation(other, relu_slope) != (name, param) for other in merged):
            raise ValueError(f"different activations follow its calls: {', '.join(_names(merged))}")
        new = batch_norm_like(layer, InPlaceABN, name, param)
        if name == "identity":
            _check_readers_of_identity(calls)
        _check_output_is_left_alone(calls)
        what = f" + {type(activation).__name__}" if merged or own is not None else ""
        return Replacement(layer, new, f"{type(layer).__name__}{what}", merged=merged)


def _own_activation(layer: nn.Module) -> nn.Module | None:
    """The activation of a batch normalisation like timm's BatchNormAct2d, which then holds `drop` and `act`."""
    if isinstance(layer, BATCH_NORMS) and layer._modules.keys() == {"drop", "act"}:
        return layer._modules["act"] if type(layer.drop) is nn.Identity and not is_customised(layer.drop) else None
    return None


def _twin(layer: nn.Module) -> ABN | None:
    """A layer of ours that computes the same as a batch normalisation with an activation of its own."""
    activation = _own_activation(layer)
    if activation is None:
        return None
    try:
        name, param = ("relu", 0.0) if type(activation) is nn.ReLU else inplace_activation(activation, None)
        twin = batch_norm_like(layer, ABN, name, param)
    except ValueError:
        return None
    for buffer in STATE[2:]:
        values = getattr(layer, buffer)
        setattr(twin, buffer, None if values is None else values.clone())
    return twin


def _followers(calls: list[NormCall]) -> tuple[nn.Module, ...]:
    """The activation modules that follow the calls, each the only reader of an output; none for no activation."""
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
                f"the function {reader} follows, but only modules can be replaced; recompute_activations serves "
                f"functions"
            )
    if any(call.is_returned for call in calls):
        raise ValueError("the network returns its output, which may then be overwritten")
    _check_output_is_left_alone(calls)
    if not any(reader.function in KEEP_INPUT for reader in readers):
        names = ", ".join(dict.fromkeys(_names(readers))) or "nothing"
        raise ValueError(f"an in-place layer would save no memory: its output goes to {names}, which does not keep it")


def _check_output_is_left_alone(calls: list[NormCall]) -> None:
    for call in calls:
        if call.writer is not None and not call.activations and _is_activation(call.writer):
            raise ValueError(
                f"followed by {call.writer}, which an in-place layer does not compute, and which overwrites the output "
                f"that the layer needs for its backward pass; use inplace=False there"
            )
        if call.writer is not None:
            raise ValueError(
                f"the output is overwritten by {call.writer}, but an in-place layer needs it for its backward pass; "
                f"write `x = x + y` or use inplace=False there"
            )


def _is_activation(reader: Reader) -> bool:
    return type(reader.module).__module__ == nn.ReLU.__module__


def _names(readers: Iterable[nn.Module | Reader | str]) -> list[str]:
    return [type(reader).__name__ if isinstance(reader, nn.Module) else str(reader) for reader in readers]
