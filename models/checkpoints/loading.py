"""Load weights into a network by name and shape, and report what matched."""

import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import takewhile
from typing import NamedTuple

import torch
from torch import Tensor, nn

from models.private_torch import tree_leaves

SHOWN_NAMES = 4  # of all tensors or layers that a message is about

# What DataParallel, torch.compile, checkpointing of activations, FSDP and Lightning's Fabric put into names.
WRAPPERS = ("module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_forward_module")


class Loaded(NamedTuple):
    """The report of a load."""

    source: str  # file, step, and which weights
    matched: list[str]  # the network's tensors that were loaded
    skipped: dict[str, str]  # tensor in the file -> why it was not used
    new: list[str]  # the network's tensors that keep their values
    remarks: tuple[str, ...] = ()  # sentences about the file

    def __str__(self) -> str:
        lines = [
            f"starts from {self.source}: {len(self.matched)} tensors matched, {len(self.skipped)} skipped, "
            f"{len(self.new)} new"
        ]
        lines += [f"  {remark}" for remark in self.remarks]
        for reason in dict.fromkeys(self.skipped.values()):
            names = [name for name, why in self.skipped.items() if why == reason]
            lines.append(f"  skipped {listed(names)}: {reason}")
        if self.new:
            lines.append(f"  new {listed(self.new)}")
        return "\n".join(lines)


def listed(names: Sequence[str], separator: str = ", ") -> str:
    """The first names, and the number of further ones."""
    text = separator.join(names[:SHOWN_NAMES])
    hidden = len(names) - SHOWN_NAMES
    return f"{text} and {hidden} more" if hidden > 0 else text


def load_by_name(
    network: nn.Module,
    tensors: Mapping[str, Tensor],
    *,
    source: str,
    name: str,
    advice: str,
    advice_on_head: str = "",
    skip: Callable[[str, Tensor], str | None] = lambda name, tensor: None,
    remarks: Sequence[str] = (),
    channels: int = 3,
) -> Loaded:
    """Load by name and shape. The whole body must match, and the whole head if the file has one.

    An auxiliary head may be missing in the file or in the network. A body's tensors are found with and without the
    prefix `body.`, in networks with and without a head. A classifier for another number of classes, or of another
    kind of network, is skipped.

    Args:
        tensors: of the file, with scales as the network parametrises them.
        source, remarks: for the report.
        name: of the file, for messages.
        advice: the end of the message about a misfit; `advice_on_head`: after it, if the body fits.
        skip: name and tensor -> why not to load it, or None.
        channels: of the network's images; the weights of three channels are spread over others.

    ValueError: the tensors do not fit; the network is unchanged.
    """
    state = network.state_dict()
    tensors, spread_remarks = _spread_over_channels(state, _named_as_in(state, tensors), channels)
    reasons = {key: _reason_to_skip(key, tensor, state) or skip(key, tensor) for key, tensor in tensors.items()}
    skipped = {key: reason for key, reason in reasons.items() if reason is not None}
    loaded = {key: tensor for key, tensor in tensors.items() if key not in skipped}

    new = [key for key in state if key not in loaded]
    misfits = _misfits(state, loaded)
    if misfits:
        if not any(map(is_of_body, misfits)):
            advice += advice_on_head
        raise ValueError(f"{name} does not fit the network: {listed([*misfits.values()], '; ')}. {advice}")
    bad_names = not_finite(loaded)
    if bad_names:
        raise ValueError(
            f"{name} has infinite or NaN weights: {listed(bad_names)}. It was saved after an overflow, or is damaged: "
            f"give an earlier checkpoint, or copy it again"
        )
    network.load_state_dict({**state, **loaded})
    return Loaded(source, list(loaded), skipped, new, (*remarks, *spread_remarks))


def _misfits(state: Mapping[str, Tensor], loaded: Mapping[str, Tensor]) -> dict[str, str]:
    """Why tensors, by name, cannot be loaded into a network with this state: no place, other shapes, missing ones."""
    misfits = {key: f"{key} has no place in the network" for key in loaded if key not in state}
    for key, tensor in loaded.items():
        if key in state and state[key].shape != tensor.shape:
            shapes = f"{_shape_text(tensor)} in the file and {_shape_text(state[key])} in the network"
            misfits[key] = f"{key} is {shapes}"
    has_head = any(key.startswith("head.") for key in loaded)
    for key in state:
        is_required = is_of_body(key) or (has_head and key.startswith("head.") and not is_auxiliary(key))
        # The counts are used only without momentum; older programs did not save them.
        if is_required and key not in loaded and not key.endswith("num_batches_tracked"):
            misfits[key] = f"{key} is not in the file"
    return misfits


def not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Names of the tensors with an infinite or NaN value. Waits for their device once."""
    finite = [tensor.isfinite().all() for tensor in tensors.values()]
    flags = torch.stack(finite).tolist() if finite else []
    return [name for name, is_finite in zip(tensors, flags, strict=True) if not is_finite]


def state_dict_in(content: object) -> tuple[object, tuple[str, ...]]:
    """The state dict in another program's file, EMA weights if they are complete, and remarks about these.

    It may lie below state_dict or model; EMA weights below a key such as state_dict_ema or model_ema.
    """
    if not isinstance(content, Mapping):
        return content, ()
    raw = content.get("state_dict", content.get("model", content))
    if "current_model_state" in content:
        return raw, ("EMA weights, as Lightning stores them in state_dict",)
    remarks: tuple[str, ...] = ()
    for key, value in content.items():
        if isinstance(value, Tensor) or not _is_average(key) or not any(map(torch.is_tensor, tree_leaves(value))):
            continue
        average = _state_dict_below(value) or {}  # none if it is a list
        if "steps" in average:  # mmengine's counter; it stores the EMA weights as state_dict
            return raw, ("EMA weights, as mmengine stores them in state_dict",)
        missing = {*map(_without_wrappers, _state_dict_below(raw) or {})} - {*map(_without_wrappers, average)}
        missing = {name for name in missing if not name.endswith("num_batches_tracked")}
        if average and not missing:
            return average, (f"EMA weights, of {key}",)
        remarks += (f"left out {key}, EMA weights without {listed(sorted(missing))}",)
    return raw, remarks


def _is_average(name: object) -> bool:
    return isinstance(name, str) and re.search(r"(?i)(?<![a-z])(ema|swa|averaged?|avg)(?![a-z])", name) is not None


def _state_dict_below(value: object) -> Mapping[str, Tensor] | None:
    """A state dict, perhaps below the keys of a program's object for averages; None if there is none."""
    if not isinstance(value, Mapping) or not value:
        return None
    if all(isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in value.items()):
        return value
    return next(
        filter(None, (_state_dict_below(value.get(key)) for key in ("state_dict", "module", "model", "shadow"))), None
    )


def _without_wrappers(name: str) -> str:
    """A tensor's name without wrappers."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def unwrapped(tensors: Mapping[str, Tensor], parts: Collection[str]) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """A state dict without the name prefixes of other programs' wrappers, and remarks about it.

    `WRAPPERS` are removed anywhere in a name, and then the prefix of the network's tensors, or the one that all
    names share; tensors with another prefix are left out. So is the counter of AveragedModel. `parts`: first parts of
    names that belong to the network.
    """
    paths = {tuple(name.split(".")): tensor for name, tensor in tensors.items() if not name.endswith("n_averaged")}
    removed = [wrapper for wrapper in WRAPPERS if any(wrapper in path for path in paths)]
    plain_paths = {tuple(part for part in path if part not in WRAPPERS): tensor for path, tensor in paths.items()}
    if len(plain_paths) == len(paths):
        paths = plain_paths
    else:  # two names would be the same
        removed = []
    prefix = _prefix([*paths], parts)
    if prefix:
        removed.append(".".join(prefix))
    below = {".".join(path[len(prefix) :]): t for path, t in paths.items() if path[: len(prefix)] == prefix}
    unrelated = [".".join(path) for path in paths if path[: len(prefix)] != prefix]
    remarks = []
    if removed:
        remarks.append(f"names without {', '.join(f'{part}.' for part in removed)}, which other programs add")
    if any(map(_is_average, prefix)):
        remarks.append(f"EMA weights, of {'.'.join(prefix)}")
    if unrelated:
        remarks.append(f"skipped {listed(unrelated)}: not below {'.'.join(prefix)}")
    return below, tuple(remarks)


def _prefix(names: Sequence[tuple[str, ...]], parts: Collection[str]) -> tuple[str, ...]:
    """What precedes the network's parts in most names, if these are most below it; or what all names share.

    If EMA weights are as many, they are taken.
    """
    ahead = Counter(
        tuple(takewhile(lambda part: part not in parts, name)) for name in names if not {*name}.isdisjoint(parts)
    )
    prefixes = sorted(ahead.items(), key=lambda pair: (pair[1], any(map(_is_average, pair[0]))))
    for prefix, count in prefixes[-1:]:
        if 2 * count >= sum(name[: len(prefix)] == prefix for name in names):
            return prefix
    shared_path = os.path.commonprefix([name[:-1] for name in names]) if len(names) > 1 else ()
    return tuple(takewhile(lambda part: not part.isdecimal(), shared_path))


def is_of_body(name: str) -> bool:
    """Whether a tensor belongs to neither a head nor a classifier."""
    return not name.startswith("head.") and not is_of_classifier(name)


def is_auxiliary(name: str) -> bool:
    """Whether a tensor belongs to an auxiliary head, which only trainings have."""
    return name.startswith("head.auxiliary.")


def is_of_classifier(name: str) -> bool:
    """Whether a tensor belongs to the classifier of pixels, `cls`, or of whole images, `classifier`."""
    return name.startswith("cls.") or "classifier" in name.split(".")


def _named_as_in(state: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Add or remove the prefix of a body in a whole network."""
    if tensors.keys() & state.keys():
        return dict(tensors)
    of_whole = any(name.startswith(("body.", "head.", "cls.")) for name in tensors)
    if _has_body(state) and not of_whole:
        return {f"body.{name}": tensor for name, tensor in tensors.items()}
    if not _has_body(state) and of_whole:
        return {name.removeprefix("body."): tensor for name, tensor in tensors.items()}
    return dict(tensors)


def _spread_over_channels(
    state: Mapping[str, Tensor], tensors: dict[str, Tensor], channels: int
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Spread a convolution of three input channels over those of the network's, as timm does. Returns remarks too.

    The three are repeated, cut to the number, and times 3 / number. One channel gets their sum: gray images give what
    they give as RGB.
    """
    if channels == 3:
        return tensors, ()
    how = "one is their sum" if channels == 1 else f"repeated, times 3/{channels}"
    spread = dict(tensors)
    remarks: tuple[str, ...] = ()
    for name, weights in tensors.items():
        expected = (*weights.shape[:1], channels, *weights.shape[2:])  # (out, channels, h, w)
        if weights.ndim != 4 or weights.shape[1] != 3 or name not in state or state[name].shape != expected:
            continue
        if channels == 1:
            spread[name] = weights.sum(dim=1, keepdim=True)
        else:
            repeated = weights.repeat(1, -(-channels // 3), 1, 1)[:, :channels]
            spread[name] = (repeated * (3 / channels)).to(weights.dtype)
        remarks += (f"{name}: the weights of 3 channels are spread over {channels} ({how})",)
    return spread, remarks


def _has_body(names: Mapping[str, Tensor]) -> bool:
    return any(name.startswith("body.") for name in names)


def _reason_to_skip(name: str, tensor: Tensor, state: Mapping[str, Tensor]) -> str | None:
    if name in state:
        if is_of_classifier(name) and tensor.ndim and state[name].ndim and len(tensor) != len(state[name]):
            return f"for {len(tensor)} classes: expected {len(state[name])}"
    elif _has_body(state):
        if name.startswith("body.classifier."):
            return "it classifies whole images"
        if is_auxiliary(name):
            return "it is an auxiliary head's, and the network has none"
    elif name.startswith(("head.", "cls.")):
        return "it classifies pixels"
    elif is_of_classifier(name):
        return "the network has no such classifier"
    return None


def _shape_text(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "a number"
