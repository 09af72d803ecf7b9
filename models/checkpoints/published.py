"""The weights that torchvision and timm publish: their images, download, and network."""

import json
import math
import sys
from argparse import Namespace
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from models.checkpoints.torch_files import SAFETENSORS, safetensors_for

PUBLISHED = "published"  # instead of a file: the library's own


class Normalisation(NamedTuple):
    """Mean and standard deviation of images' colour channels, red first, from 0 to 1."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


IMAGENET = Normalisation((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
HALF = Normalisation((0.5,) * 3, (0.5,) * 3)
_VALUES = ("mean", "std", "pretrained_cfg")  # of a file's metadata
OF_TENSORFLOW = ("googlenet", "inception_v3")  # torchvision's networks themselves turn IMAGENET into HALF


def timm_normalisation(network: str) -> Normalisation:
    """The normalisation of timm's weights NAME.TAG. A plain NAME has its default tag's; unknown ones have IMAGENET."""
    try:
        import timm

        published = timm.get_pretrained_cfg(network)
    except (ImportError, RuntimeError):  # `timm_body` says how to install it, and which tags there are
        return IMAGENET
    return IMAGENET if published is None else Normalisation(tuple(published.mean), tuple(published.std))


def timm_tags(network: str) -> dict[Normalisation, list[str]]:
    """The tags of timm's weights of a plain name by their normalisation; none of NAME.TAG."""
    import timm

    tags: dict[Normalisation, list[str]] = {}
    for name in timm.list_pretrained(f"{network}.*") if "." not in network else ():
        tags.setdefault(timm_normalisation(name), []).append(name.partition(".")[2])
    return tags


def stated_normalisation(path: Path, content: object) -> Normalisation | None:
    """The normalisation that a file states: its header, or a config.json beside it, or a timm training's arguments.

    ValueError: what they state is none.
    """
    args = content.get("args") if isinstance(content, dict) else None
    arguments = vars(args) if isinstance(args, Namespace) else {}
    source = path
    statement: Any = {key: value for key, value in arguments.items() if value is not None}
    with suppress(OSError, ValueError, KeyError, TypeError):  # as on the Hub
        config_path = path.parent / "config.json"
        statement = json.loads(config_path.read_text("utf-8"))["pretrained_cfg"]
        source = config_path
    header = _header_of(path) if path.suffix == SAFETENSORS else {}
    metadata: dict[str, Any] = {}
    for values in (statement, header, header.get("pretrained_cfg", {})):
        if not isinstance(values, dict):
            raise ValueError(f"{source}: pretrained_cfg={values}: expected a mapping with mean and std")
        metadata |= values
    if {"mean", "std"} & metadata.keys():
        mean, std = (_channel_numbers(source, key, metadata.get(key)) for key in Normalisation._fields)
        return Normalisation(mean, std)
    return timm_normalisation(str(metadata["model"])) if "." in str(metadata.get("model", "")) else None


def _header_of(path: Path) -> dict[str, Any]:
    """What the header of a file of safetensors states."""
    texts: dict[str, Any] = {}
    with suppress(OSError, ValueError), safetensors_for(path.name).safe_open(path, "pt") as file:
        texts = file.metadata() or {}
        texts |= {key: json.loads(texts[key]) for key in _VALUES if key in texts}
    return texts


def _channel_numbers(source: Path, key: str, values: Any) -> tuple[float, ...]:
    """Numbers that a file states for the channels. ValueError: they are none, or a deviation is not above 0."""
    numbers = values if isinstance(values, list | tuple) else ()
    least = 0 if key == "mean" else sys.float_info.min
    if not numbers or not all(type(number) in (int, float) and least <= number < math.inf for number in numbers):
        above = ", above 0" if key == "std" else ""
        raise ValueError(f"{source} states {key}={values}: expected a number for each channel{above}")
    return tuple(numbers)


def downloaded_file(library: str, network: str) -> Path:
    """The file of a network's default weights, in PyTorch's or Hugging Face's folder; downloaded if it is not there.

    ValueError: there are no such weights, or they cannot be downloaded.
    """
    source = f"the weights of {network}"
    try:
        if library == "torchvision":
            from torchvision import models

            source = models.get_model_weights(network).DEFAULT.url
        else:
            import timm
            from huggingface_hub import hf_hub_download

            config: Any = timm.get_pretrained_cfg(network, allow_unregistered=False)
            source = config.url or f"{config.hf_hub_id}/model.safetensors"
            if not config.url:
                return Path(hf_hub_download(config.hf_hub_id, "model.safetensors"))
        path = Path(torch.hub.get_dir(), "checkpoints", source.rpartition("/")[2])
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.hub.download_url_to_file(source, str(path))
        return path
    except Exception as error:  # of two libraries and the network
        raise ValueError(
            f"{source} cannot be downloaded ({error or type(error).__name__}): fetch it elsewhere and give "
            f"the file instead"
        ) from error
