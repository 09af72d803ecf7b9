"""The weights that torchvision and timm publish: their images, download, and network."""

from pathlib import Path
from typing import NamedTuple

import torch

PUBLISHED = "published"  # instead of a file: the library's own


class Normalisation(NamedTuple):
    """Mean and standard deviation of images' colour channels, red first, from 0 to 1."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


IMAGENET = Normalisation((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def timm_normalisation(network: str) -> Normalisation:
    """The normalisation with which timm's published weights of a network were trained; IMAGENET if it has none."""
    try:
        import timm
    except ImportError:  # `timm_body` says how to install it
        return IMAGENET
    published = timm.get_pretrained_cfg(network)
    return IMAGENET if published is None else Normalisation(published.mean, published.std)


def downloaded(library: str, network: str) -> Path:
    """The file of a network's default weights, in PyTorch's or Hugging Face's folder; downloaded if it is not there.

    ValueError: there are no such weights, or they cannot be downloaded.
    """
    where = f"the weights of {network}"
    try:
        if library == "torchvision":
            from torchvision import models

            where = models.get_model_weights(network).DEFAULT.url
        else:
            import timm
            from huggingface_hub import hf_hub_download

            config = timm.get_pretrained_cfg(network, allow_unregistered=False)
            where = config.url or f"{config.hf_hub_id}/model.safetensors"
            if not config.url:
                return Path(hf_hub_download(config.hf_hub_id, "model.safetensors"))
        path = Path(torch.hub.get_dir(), "checkpoints", where.rpartition("/")[2])
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.hub.download_url_to_file(where, str(path))
        return path
    except Exception as error:  # of two libraries and the network
        raise ValueError(
            f"{where} cannot be downloaded ({error or type(error).__name__}): fetch it elsewhere and give "
            f"the file instead"
        ) from error
