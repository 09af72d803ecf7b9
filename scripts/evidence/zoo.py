"""The networks that `networks` measures: of torchvision and other packages, from small configurations, or frozen."""

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torchvision.models.detection.backbone_utils import resnet_fpn_backbone
from torchvision.models.resnet import Bottleneck

DECODER = "decoder"
VOCABULARY = 4096
LARGE, SMALL = (768, 12, 12, 1024), (32, 2, 2, 16)  # of the decoder: width, heads, blocks, and length of a text
_WORDS, _LENGTH, _WIDTH, _LAYERS, _HEADS = 256, 128, 128, 8, 4  # of networks from configurations


class Decoder(nn.Module):
    """Tokens (N, T) -> logits (N, T, VOCABULARY): a small language model of PyTorch's own blocks."""

    def __init__(self, width: int, heads: int, depth: int):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        blocks = (
            nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(depth)
        )
        self.blocks = nn.ModuleList(blocks)
        self.classifier = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], tokens.device)
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, mask, is_causal=True)
        return self.classifier(x)


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


def frozen(network: nn.Module) -> nn.Module:
    return network.eval().requires_grad_(False)


def convolutions() -> nn.Module:
    """Six frozen convolutions with ReLU after one that learns."""
    layers = [layer for _ in range(6) for layer in (nn.Conv2d(64, 64, 3, padding=1), nn.ReLU())]
    return nn.Sequential(nn.Conv2d(3, 64, 7, 4, 3), frozen(nn.Sequential(*layers)))


def resnet50() -> nn.Module:
    """A frozen ResNet-50 between a stem and a head that learn, as for images of other channels."""
    network = frozen(torchvision.models.resnet50())
    network.conv1.requires_grad_(True)
    network.fc.requires_grad_(True)
    return network


class _Adapted(nn.Module):
    """A frozen block, and two narrow convolutions that learn to correct its result."""

    def __init__(self, block: nn.Module):
        super().__init__()
        assert isinstance(block, Bottleneck)
        channels = block.conv3.out_channels
        self.block = block
        self.adapter = nn.Sequential(
            nn.Conv2d(channels, channels // 16, 1), nn.ReLU(), nn.Conv2d(channels // 16, channels, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.block(x)
        return y + self.adapter(y)


def resnet50_adapters() -> nn.Module:
    """A frozen ResNet-50 with an adapter after each block."""
    network = frozen(torchvision.models.resnet50())
    for name in ("layer1", "layer2", "layer3", "layer4"):
        stage = network.get_submodule(name)
        setattr(network, name, nn.Sequential(*(_Adapted(block) for block in stage.children())))
    network.fc.requires_grad_(True)
    return network


def fpn_resnet50() -> nn.Module:
    """The feature pyramid of a detector in fine-tuning: all norms are frozen, and the stem and the first stage."""
    network = resnet_fpn_backbone(backbone_name="resnet50", weights=None, norm_layer=nn.BatchNorm2d, trainable_layers=3)
    for norm in filter(lambda module: isinstance(module, nn.BatchNorm2d), network.modules()):
        frozen(norm)
    return network


FROZEN = {build.__name__: build for build in (convolutions, resnet50, resnet50_adapters, fpn_resnet50)}
NETWORKS = (
    *("alexnet", "vgg16_bn", "squeezenet1_1", "googlenet", "inception_v3"),
    *("resnet18", "resnet50", "resnet101", "resnext50_32x4d", "wide_resnet50_2", "densenet121", "densenet169"),
    *("mobilenet_v2", "mobilenet_v3_small", "mobilenet_v3_large", "mnasnet1_0", "shufflenet_v2_x1_0"),
    *("regnet_x_400mf", "regnet_y_400mf", "efficientnet_b0", "efficientnet_v2_s"),
    *("convnext_tiny", "swin_t", "swin_v2_t", "vit_b_16", "maxvit_t"),
    *("fcn_resnet50", "deeplabv3_resnet50", "deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large"),
    *("timm/densenet121", "timm/efficientnet_b0", "timm/mobilenetv4_conv_small", "timm/convnextv2_atto"),
    *("timm/vit_small_patch16_224", "smp/Unet-resnet34", "smp/FPN-resnet50", "smp/DeepLabV3Plus-mobilenet_v2"),
    *(f"transformers/{name}" for name in _TRANSFORMERS),
    *("diffusers/UNet2DConditionModel", "nnunet/PlainConvUNet"),
    *(f"frozen/{name}" for name in FROZEN),
)
PACKAGES = {
    "": "torchvision",
    "timm": "timm",
    "smp": "segmentation_models_pytorch",
    "transformers": "transformers",
    "diffusers": "diffusers",
    "nnunet": "dynamic_network_architectures",
    "frozen": "torchvision",
}  # by the part before the slash
OPTIONS: dict[str, dict[str, Any]] = {
    "googlenet": {"init_weights": False},  # the default is slow
    "inception_v3": {"init_weights": False, "aux_logits": False},  # its auxiliary logits need images of 299 pixels
    **{name: {"weights_backbone": None} for name in NETWORKS if name.startswith(("fcn", "deeplabv3", "lraspp"))},
}
SIZED: dict[str, Callable[[int], dict[str, Any]]] = {  # options of networks for images of one size
    "vit_b_16": lambda size: {"image_size": size},
    "maxvit_t": lambda size: {"input_size": (size, size)},
    "timm/vit_small_patch16_224": lambda size: {"img_size": size},
}
# The modules that the authors of these networks call blocks, by the names of their classes.
BLOCK_NAMES = frozenset(
    """
    Fire Inception InceptionA InceptionB InceptionC InceptionD InceptionE BasicBlock Bottleneck _DenseLayer
    InvertedResidual _InvertedResidual ResBottleneckBlock MBConv FusedMBConv CNBlock SwinTransformerBlock
    SwinTransformerBlockV2 EncoderBlock MaxVitLayer DenseLayer DepthwiseSeparableConv UniversalInvertedResidual
    ConvNeXtBlock Block UnetDecoderBlock FPNBlock TransformerEncoderLayer GPT2Block BertLayer LlamaDecoderLayer ViTLayer
    WhisperEncoderLayer WhisperDecoderLayer ResnetBlock2D BasicTransformerBlock StackedConvBlocks
    """.split()
)


def build(name: str, size: int) -> nn.Module:
    """A network of `NETWORKS` for square images of `size` pixels. ModuleNotFoundError: its package is not installed."""
    package, _, own = name.rpartition("/")
    options = OPTIONS.get(name, {}) | SIZED.get(name, lambda size: {})(size)
    if package == "frozen":
        return FROZEN[own]()
    module: Any = importlib.import_module(PACKAGES[package])
    if package == "timm":
        return module.create_model(own, pretrained=False, **options)
    if package == "smp":
        architecture, _, encoder = own.partition("-")
        return getattr(module, architecture)(encoder, encoder_weights=None, classes=19, **options)
    if package == "nnunet":
        unet: Any = importlib.import_module(f"{module.__name__}.architectures.unet")
        return OfPixels(unet.PlainConvUNet(**_VOLUME_UNET), _volume)
    if package == "diffusers":
        return OfPixels(getattr(module, own)(**_UNET), _noise)
    if package == "transformers":
        network, configuration, keys, inputs = _TRANSFORMERS[own]
        return OfPixels(getattr(module, network)(getattr(module, configuration)(**keys)), inputs)
    return torchvision.models.get_model(own, weights=None, **options)


def made(name: str, device: str, images: int, size: int) -> tuple[nn.Module, Tensor]:
    """A network with random weights on the device, and a minibatch: images (N, 3, size, size), or texts for `DECODER`.

    Weights that start from zero would make all gradients before them zero, so they are random as well.
    """
    torch.manual_seed(0)
    if name == DECODER:
        width, heads, depth, length = LARGE if size >= 224 else SMALL
        network: nn.Module = Decoder(width, heads, depth)
        return network.to(device), torch.randint(VOCABULARY, (max(2, images // 8), length), device=device)
    network = build(name, size)
    with torch.no_grad():
        for parameter in network.parameters():
            if not parameter.any():
                parameter.normal_(std=0.02)
    return network.to(device), torch.randn(images, 3, size, size, device=device)


def blocks_of(network: nn.Module) -> list[nn.Module]:
    """The outermost modules that are blocks, in the order of the module tree."""
    if type(network).__name__ in BLOCK_NAMES:
        return [network]
    return [block for child in network.children() for block in blocks_of(child)]
