"""Checkpoints of the paper's authors."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from keepless import from_released
from models.checkpoints import torch_files
from models.checkpoints.loading import Loaded, listed, load_by_name, state_dict_in, unwrapped
from models.checkpoints.recognition import architecture_of, body_of
from models.checkpoints.released_files import released_file

EPS = 1e-5  # of the released layers, in the variance and in the scale
SCALES = ("released", "raw")
PARTS = ("body", "head", "cls")  # of a segmentation file
WRAPPER = re.compile(r"^((?:body|head|cls)\.)?module\.")  # which the release writes
# In very old files a norm was a module with another one inside, "bn".
OLD_LEVEL = re.compile(r"(^|\.)(bn\d*|bn_out|\w+_bn)\.bn\.")


class ReleasedWeights(NamedTuple):
    """The tensors of a released file under our names."""

    tensors: dict[str, Tensor]  # values as in the file; of a segmentation network with the prefixes of its parts
    scale: str  # "released": a norm's weight w means the scale |w| + eps; "raw": the scale w
    remarks: tuple[str, ...]  # about the file, and why it has this scale

    @property
    def eps(self) -> float | None:
        """The eps of norms whose scale is |weight| + eps; None if the weight is the scale."""
        return EPS if self.scale == "released" else None

    def converted(self) -> dict[str, Tensor]:
        """The tensors, with scales in the form that our layers use."""
        return self.tensors if self.eps is None else from_released(self.tensors, self.eps)


def load_released(network: nn.Module, path: str | Path, scale: str | None = None) -> Loaded:
    """Load a released checkpoint of a classification or segmentation network; names and shapes must match.

    Args:
        network: a body of `models.bodies`, or a `SegmentationNetwork`, which takes the body of a classification file;
            its norms are of any kind in `keepless`.
        path: the file as downloaded. Despite its name (.pth.tar) it is not an archive.
        scale: "released": a norm's weight w means the scale |w| + eps, as in the release's in-place and
            synchronised layers. "raw": the scale w, as in its standard layers. None: by the md5 if it is a file of the
            release, otherwise "released". A file does not say which it holds.

    Returns:
        What matched, and which scale was used and why.

    Raises:
        ValueError: the file cannot be read, is not a released file, has another scale, or does not fit the network
            (which is then unchanged).
    """
    path = Path(path)
    file = weights_in(read(path, str(path)), path, str(path), scale, otherwise="released")
    return load_by_name(
        network,
        file.converted(),
        source=f"{path} (released)",
        name=str(path),
        advice=f"The file holds {architecture_of(body_of(file.tensors))}",
        remarks=file.remarks,
    )


def read(path: Path, name: str, advice: str | None = None) -> object:
    """Read a released file; `name` is its name in messages. ValueError: see `torch_files.read`, with its `advice`."""
    expected = "a checkpoint of the in-place ABN release as downloaded (not unpacked, although it is called .pth.tar)"
    return torch_files.read(path, name, expected, advice or "download it again")


def weights_in(
    content: object,
    path: Path,
    name: str,
    scale: str | None = None,
    *,
    otherwise: str | None = None,
    key: str = "scale",
) -> ReleasedWeights:
    """Find the tensors in the content of a released file.

    Args:
        content: what `read` returned.
        path: the file; the md5 says whether it is one of the release.
        scale: as for `load_released`; None: by the md5.
        otherwise: the scale of other files if `scale` is None.
        name, key: of the file and of the argument `scale`, for messages.

    ValueError: the content has another layout, the scale is wrong, or it is not known.
    """
    tensors, name_remarks = _tensors(content, name)
    used_scale, why = _scale_of(path, name, scale, otherwise, key)
    counters = [tensor_name for tensor_name in tensors if tensor_name.endswith("num_batches_tracked")]
    if used_scale == "released" and counters:
        raise ValueError(
            f"{name} has {listed(counters)}, which the release's in-place layers lack: give {key}=raw if it is of a "
            f"network with standard batch normalisation"
        )
    meaning = "|weight| + eps" if used_scale == "released" else "weight"
    remark = f"norms scale by {meaning} ({used_scale}): {why}"
    return ReleasedWeights(tensors, used_scale, (remark, *name_remarks))


def _scale_of(path: Path, name: str, scale: str | None, otherwise: str | None, key: str) -> tuple[str, str]:
    """The scale of a file, and why it has this one. Arguments as for `weights_in`."""
    if scale not in (None, *SCALES):
        raise ValueError(f"{key}={scale}: expected one of {', '.join(SCALES)}")
    released = released_file(path)
    if released is not None:
        if scale not in (None, released.scale):
            cure = f"leave it out, or give {key}={released.scale}"
            raise ValueError(f"{key}={scale} is wrong for {name}, {released}; {cure}")
        return released.scale, f"it is {released}"
    if scale is not None:
        return scale, f"as {key} says"
    if otherwise is not None:
        return otherwise, "the default for other files"
    raise ValueError(
        f"{name} is none of the released files, so its scales are not known: give {key}=released if it is of a "
        f"network with the release's in-place or synchronised layers (scale |weight| + eps), or {key}=raw with "
        f"its standard layers (scale weight)"
    )


def _tensors(content: object, name: str) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """The tensors of either layout under our names, and remarks about them. ValueError for another layout."""
    state, remarks = state_dict_in(content)
    if isinstance(state, Mapping) and all(isinstance(state.get(part), Mapping) for part in PARTS):
        state = {f"{part}.{key}": tensor for part in PARTS for key, tensor in state[part].items()}
    if isinstance(state, Mapping):
        unprefixed = {WRAPPER.sub(r"\1", str(key)): tensor for key, tensor in state.items()}
        unwrapped_tensors, name_remarks = unwrapped(unprefixed, PARTS)
        state = {OLD_LEVEL.sub(r"\1\2.", key): tensor for key, tensor in unwrapped_tensors.items()}
        remarks += name_remarks
    if not isinstance(state, dict) or not all(isinstance(tensor, Tensor) for tensor in state.values()):
        actual = ", ".join(map(str, list(content)[:5])) if isinstance(content, Mapping) else type(content).__name__
        raise ValueError(
            f"{name} does not have the layout of the release: expected a dictionary with state_dict, which holds "
            f"tensors, or one dictionary for each of {', '.join(PARTS)}; found {actual}"
        )
    try:
        architecture_of(body_of(state))
    except ValueError as error:
        raise ValueError(f"{name} is not of a network of the release: {error}") from error
    return state, remarks


def to_standard_bn(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state dict of our network for PyTorch's batch normalisation: norms with `learn_scale=False` get ones."""
    norms = [name.removesuffix("running_mean") for name in state if f".{name}".endswith(".running_mean")]
    fixed = [norm for norm in norms if f"{norm}weight" not in state]
    return {**state, **{f"{norm}weight": torch.ones_like(state[f"{norm}running_var"]) for norm in fixed}}
