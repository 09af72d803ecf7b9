"""Convert whole networks from standard to in-place layers and back, keeping the same Parameters and names.

In eval mode all our layers are batch normalisation with the raw weight, so outputs do not change, for any sign of
gamma. Both functions change the network itself and return it, like `nn.SyncBatchNorm.convert_sync_batchnorm`.
Parameters and buffers stay the same objects under the same names, so optimizers and checkpoints keep working.
"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _LazyNormBase

from models.call_order import CallOrder, Place, is_customised
from models.layers import ABN, CheckpointedABN, InPlaceABN, InPlaceABNSync
from models.layers.checkpointed_abn import stop_recomputing
from models.layers.report import Report, log_report

STATE = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
OWN_LAYERS = (ABN, CheckpointedABN, InPlaceABN, InPlaceABNSync)
PASSES_ON = (nn.Identity, nn.Flatten, nn.Unflatten)  # their output is their input, or a view of it


def to_inplace(
    module: nn.Module, *, relu_slope: float | None = None, report: Callable[[Report], object] = log_report
) -> nn.Module:
    """Replace standard and checkpointed layers, and PyTorch's batch normalisations, by `InPlaceABN`.

    Our `ABN` and `CheckpointedABN` are replaced everywhere. PyTorch's BatchNorm1d, 2d, 3d and SyncBatchNorm are
    replaced if a LeakyReLU, ELU, Sigmoid, Tanh or Identity directly follows in an `nn.Sequential`, also across the ends
    of nested ones. Outside a Sequential, the order of calls is unknown. The new layer takes the name of the batch
    normalisation and an Identity takes the name of the activation, so indices and state dicts stay valid. Code that
    picks single modules out of a Sequential finds the activation in place of the batch normalisation.

    An in-place layer keeps its output. If a forward pass writes over it, as in `x += shortcut`, the backward pass
    raises PyTorch's error about a modified variable; write `x = x + shortcut`.

    Args:
        module: a network, which is changed, or a single layer, for which a new one is returned.
        relu_slope: replace ReLU, which cannot be inverted, by a leaky ReLU with this slope (0.01 in the paper). This
            changes the function of the network; its weights are then a starting point for training.
        report: called with the `Report`, e.g. `print` or the append method of a list.

    Returns:
        The module itself, or the new layer.

    Raises:
        ValueError: relu_slope is not above 0.
    """
    if relu_slope is not None and not relu_slope > 0:
        raise ValueError(f"relu_slope={relu_slope}: expected a slope above 0 (0.01 in the paper), or None")

    def planned(tree: CallOrder, layer: nn.Module) -> "_Replacement | None":
        if isinstance(layer, _BatchNorm):
            return _batch_norm_to_inplace(tree, layer, relu_slope)
        if isinstance(layer, ABN) and not isinstance(layer, InPlaceABN):
            return _own_to_inplace(tree, layer, relu_slope)
        return None

    return _convert(module, planned, report)


def to_standard(module: nn.Module, *, report: Callable[[Report], object] = log_report) -> nn.Module:
    """Replace every in-place and checkpointed layer by the standard `ABN`.

    `ABN` has the state dict of PyTorch's batch normalisation. Modules that `to_inplace` merged stay merged.

    Args:
        module: a network, which is changed, or a single layer, for which a new one is returned.
        report: called with the `Report`, e.g. `print` or the append method of a list.

    Returns:
        The module itself, or the new layer.
    """

    def planned(tree: CallOrder, layer: nn.Module) -> "_Replacement | None":
        if not isinstance(layer, ABN) or type(layer) is ABN:
            return None
        _check_plain(layer, OWN_LAYERS)
        return _Replacement(layer, _like(layer, ABN), f"{type(layer).__name__}({layer.activation})")

    return _convert(module, planned, report)


class _Replacement(NamedTuple):
    old: nn.Module
    new: nn.Module
    before: str  # for the report
    emptied: Place | None = None  # of the activation, which the new layer includes


def _convert(
    module: nn.Module,
    planned: Callable[[CallOrder, nn.Module], _Replacement | None],
    report: Callable[[Report], object],
) -> nn.Module:
    """Plan all replacements on the unchanged network, then carry them out."""
    tree, result = CallOrder(module), Report()
    plan: list[_Replacement] = []
    for layer, name in tree.names.items():
        try:
            replacement = planned(tree, layer)
        except ValueError as reason:
            result.kept[name] = f"{type(layer).__name__}: {reason}"
            continue
        if replacement is not None:
            plan.append(replacement)
            new = replacement.new
            result.replaced[name] = f"{replacement.before} -> {type(new).__name__}({new.activation})"
    for old, new, _, emptied in plan:
        for parent, name in tree.places[old]:
            parent.add_module(name, new)
        if emptied is not None:
            emptied.parent.add_module(emptied.name, nn.Identity().train(emptied.module.training))
        if old is module:
            module = new
    stop_recomputing(module)
    report(result)
    return module


# The planning functions raise a ValueError with the reason if a layer cannot be replaced.


def _own_to_inplace(tree: CallOrder, layer: ABN, relu_slope: float | None) -> _Replacement:
    _check_plain(layer, OWN_LAYERS)
    for place in tree.places[layer]:
        _check_output_is_left_alone(tree.following.get(place, []))
    options = {}
    if layer.activation == "relu":
        options = {"activation": "leaky_relu", "activation_param": _slope_for_relu(relu_slope)}
    return _Replacement(layer, _like(layer, InPlaceABN, **options), f"{type(layer).__name__}({layer.activation})")


def _batch_norm_to_inplace(tree: CallOrder, layer: _BatchNorm, relu_slope: float | None) -> _Replacement:
    _check_batch_norm(layer)
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
    name, param = _inplace_activation(activation, relu_slope)
    new = _like(
        layer,
        InPlaceABN,
        activation=name,
        activation_param=param,
        sync=isinstance(layer, nn.SyncBatchNorm),
        group=getattr(layer, "process_group", None),
    )
    _check_output_is_left_alone(following[index + 1 :])
    emptied = None if type(activation) is nn.Identity else following[index]
    return _Replacement(layer, new, f"{type(layer).__name__} + {type(activation).__name__}", emptied)


def _check_plain(layer: nn.Module, classes: tuple[type[nn.Module], ...]) -> None:
    """Raise ValueError if another class in place of a layer would lose its customisation."""
    if type(layer) not in classes:
        raise ValueError("it is a subclass, whose forward pass may differ")
    if is_customised(layer):
        raise ValueError("it has hooks, which would not run or would see a different output; remove them first")
    if {*layer._parameters, *layer._buffers, *layer._modules} != set(STATE):
        raise ValueError("it has parameters, buffers or modules of its own, which would be lost")


def _check_batch_norm(layer: _BatchNorm) -> None:
    if isinstance(layer, _LazyNormBase):
        raise ValueError("its number of channels is not known before the first forward pass")
    _check_plain(layer, BATCH_NORMS)
    statistics = [getattr(layer, name) is not None for name in STATE[2:]]
    if statistics != [layer.track_running_stats] * len(statistics):
        raise ValueError("its track_running_stats was changed after construction and does not match its buffers")
    dtypes = {values.dtype for name in STATE[:4] if (values := getattr(layer, name)) is not None}
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
                _inplace_activation(place.module, relu_slope)
            except ValueError:
                return 0
            return index
    return 0


def _inplace_activation(module: nn.Module, relu_slope: float | None) -> tuple[str, float]:
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


def _slope_for_relu(relu_slope: float | None) -> float:
    if relu_slope is None:
        raise ValueError("a ReLU cannot be inverted; relu_slope=0.01 makes it leaky, but changes the outputs")
    return relu_slope


def _like(layer: nn.Module, cls: type[ABN], **options: Any) -> ABN:
    """A layer of class `cls` with the Parameters, buffers and (unless given) options of another layer."""
    given = {name: getattr(layer, name) for name in inspect.signature(cls).parameters if hasattr(layer, name)}
    with torch.device("meta"):  # the constructor's tensors are replaced below
        new = cls(**(given | options))
    for name in STATE:
        setattr(new, name, getattr(layer, name))
    return new.train(layer.training)
