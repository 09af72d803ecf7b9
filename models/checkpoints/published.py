"""The weights that torchvision and timm publish: download them, and recognise their network."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

PUBLISHED = "published"  # instead of a file: the library's own


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


def recognised_by_size(tensors: Mapping[str, Tensor]) -> str | None:
    """The network of torchvision with as many parameters as the file of a classifier of ImageNet; None if none has."""
    from torchvision import models

    statistics = ("running_mean", "running_var", "num_batches_tracked")
    count = sum(tensor.numel() for name, tensor in tensors.items() if not name.endswith(statistics))
    for network in models.list_models(models):
        if models.get_model_weights(network).DEFAULT.meta["num_params"] == count:
            return network
    return None
