"""Networks of transformers, diffusers and nnU-Net from small configurations, with inputs made of an image's pixels."""

import importlib
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

_WORDS, _LENGTH, _WIDTH, _LAYERS, _HEADS = 256, 128, 128, 8, 4


class OfPixels(nn.Module):
    """A network, and its loss where it has one. `inputs`: its arguments, from images (N, 3, H, W)."""

    def __init__(self, network: nn.Module, inputs: Callable[[Tensor], dict[str, Any]]):
        super().__init__()
        self.network, self.inputs = network, inputs

    def forward(self, pixels: Tensor) -> Tensor:
        result = self.network(**self.inputs(pixels))
        if isinstance(result, Tensor):
            return result
        return result.loss if "loss" in result else result.sample


def _words(pixels: Tensor, length: int = _LENGTH) -> Tensor:
    """(N, length) numbers of words."""
    return (pixels.detach().flatten(1)[:, :length] * 1000).long() % _WORDS


def _text(pixels: Tensor) -> dict[str, Any]:
    words = _words(pixels)
    return {"input_ids": words, "labels": words}


def _image(pixels: Tensor) -> dict[str, Any]:
    return {"pixel_values": pixels[:, :, :64, :64], "labels": _words(pixels, 1)[:, 0] % 2}


def _sound(pixels: Tensor) -> dict[str, Any]:
    return {"input_features": pixels[:, 0, :16, :64].repeat(1, 1, 4), "labels": _words(pixels, 64)}


def _noise(pixels: Tensor) -> dict[str, Any]:
    states = pixels[:, 0, :8, :32]
    return {"sample": pixels[:, :, :32, :32], "timestep": _words(pixels, 1)[:, 0], "encoder_hidden_states": states}


def _volume(pixels: Tensor) -> dict[str, Any]:
    return {"x": pixels[:, :, :64, :64].reshape(-1, 1, 12, 32, 32)}


_SIZES = {"hidden_size": _WIDTH, "num_hidden_layers": _LAYERS, "num_attention_heads": _HEADS}
_WHISPER = {
    **{f"{part}_layers": _LAYERS // 2 for part in ("encoder", "decoder")},
    **{f"{part}_attention_heads": _HEADS for part in ("encoder", "decoder")},
    **{f"{part}_ffn_dim": 4 * _WIDTH for part in ("encoder", "decoder")},
    **{"d_model": _WIDTH, "vocab_size": _WORDS, "num_mel_bins": 16, "max_source_positions": 128},
    **{"max_target_positions": 64, "decoder_start_token_id": 1, "use_cache": False},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
_GPT2 = {
    **{"n_embd": _WIDTH, "n_layer": _LAYERS, "n_head": _HEADS, "n_positions": _LENGTH, "vocab_size": _WORDS},
    **{"use_cache": False, "bos_token_id": 0, "eos_token_id": 0},
}
_UNET = {
    **{"sample_size": 32, "in_channels": 3, "out_channels": 3, "block_out_channels": (32, 64), "layers_per_block": 1},
    **{"cross_attention_dim": 32, "attention_head_dim": 8, "norm_num_groups": 8},
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
}
# The blocks of nnU-Net's default for volumes, in four stages of its six.
_VOLUME_UNET = {
    **{"input_channels": 1, "n_stages": 4, "features_per_stage": (32, 64, 128, 256), "kernel_sizes": 3},
    **{"strides": (1, 2, 2, (1, 2, 2)), "n_conv_per_stage": 2, "n_conv_per_stage_decoder": 2, "num_classes": 3},
    **{"conv_op": nn.Conv3d, "conv_bias": True, "norm_op": nn.InstanceNorm3d, "nonlin": nn.LeakyReLU},
    **{"norm_op_kwargs": {"eps": 1e-5, "affine": True}, "nonlin_kwargs": {"inplace": True}},
}
# By name: classes of the network and its configuration, its options, and its inputs.
_TRANSFORMERS: dict[str, tuple[str, str, dict[str, Any], Callable[[Tensor], dict[str, Any]]]] = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", _GPT2, _text),
    "bert": ("BertForMaskedLM", "BertConfig", {**_SIZES, "intermediate_size": 512, "vocab_size": _WORDS}, _text),
    "llama": (
        *("LlamaForCausalLM", "LlamaConfig"),
        {**_SIZES, "intermediate_size": 352, "vocab_size": _WORDS, "use_cache": False},
        _text,
    ),
    "vit": (
        *("ViTForImageClassification", "ViTConfig"),
        {**_SIZES, "intermediate_size": 512, "image_size": 64, "patch_size": 8},
        _image,
    ),
    "whisper": ("WhisperForConditionalGeneration", "WhisperConfig", _WHISPER, _sound),
}
TRANSFORMERS, DIFFUSERS, NNUNET = tuple(_TRANSFORMERS), ("UNet2DConditionModel",), ("PlainConvUNet",)
PACKAGE_OF_NNUNET = "dynamic_network_architectures"


def build(package: str, name: str) -> nn.Module:
    """A network of `TRANSFORMERS`, `DIFFUSERS` or `NNUNET`, for images of at least 64 pixels."""
    if package == PACKAGE_OF_NNUNET:
        unets = importlib.import_module(f"{package}.architectures.unet")
        return OfPixels(getattr(unets, name)(**_VOLUME_UNET), _volume)
    module = importlib.import_module(package)
    if package == "diffusers":
        return OfPixels(getattr(module, name)(**_UNET), _noise)
    network, configuration, options, inputs = _TRANSFORMERS[name]
    return OfPixels(getattr(module, network)(getattr(module, configuration)(**options)), inputs)
