"""The networks that `networks` measures, all with random weights."""

import difflib
import importlib
import importlib.util
from collections.abc import Callable, Iterable
from typing import Any

import torchvision
from torch import nn

NETWORKS = (
    *("alexnet", "vgg16_bn", "squeezenet1_1", "googlenet", "inception_v3"),
    *("resnet18", "resnet50", "resnet101", "resnext50_32x4d", "wide_resnet50_2", "densenet121", "densenet169"),
    *("mobilenet_v2", "mobilenet_v3_small", "mobilenet_v3_large", "mnasnet1_0", "shufflenet_v2_x1_0"),
    *("regnet_x_400mf", "regnet_y_400mf", "efficientnet_b0", "efficientnet_v2_s"),
    *("convnext_tiny", "swin_t", "swin_v2_t", "vit_b_16", "maxvit_t"),
    *("fcn_resnet50", "deeplabv3_resnet50", "deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large"),
    *("timm/densenet121", "timm/efficientnet_b0", "timm/mobilenetv4_conv_small", "timm/convnextv2_atto"),
    *("timm/vit_small_patch16_224", "smp/Unet-resnet34", "smp/FPN-resnet50", "smp/DeepLabV3Plus-mobilenet_v2"),
)
PACKAGES = {"": "torchvision", "timm": "timm", "smp": "segmentation_models_pytorch"}  # by the part before the slash
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
# Pixels of the small images on which gradients are compared.
EXACT_DEFAULT = 64
EXACT_SIZE = {"inception_v3": 96, "maxvit_t": 224}  # they take no smaller ones

# The modules that the authors of these networks call blocks, by the names of their classes.
BLOCKS = frozenset(
    """
    Fire Inception InceptionA InceptionB InceptionC InceptionD InceptionE BasicBlock Bottleneck _DenseLayer
    InvertedResidual _InvertedResidual ResBottleneckBlock MBConv FusedMBConv CNBlock SwinTransformerBlock
    SwinTransformerBlockV2 EncoderBlock MaxVitLayer DenseLayer DepthwiseSeparableConv UniversalInvertedResidual
    ConvNeXtBlock Block UnetDecoderBlock FPNBlock
    """.split()
)


def build(name: str, size: int) -> nn.Module:
    """A network of `NETWORKS` for square images of `size` pixels."""
    package, _, own = name.rpartition("/")
    options = OPTIONS.get(name, {}) | SIZED.get(name, lambda size: {})(size)
    if package == "timm":
        return importlib.import_module("timm").create_model(own, pretrained=False, **options)
    if package == "smp":
        architecture, _, encoder = own.partition("-")
        models = importlib.import_module("segmentation_models_pytorch")
        return getattr(models, architecture)(encoder, encoder_weights=None, classes=19, **options)
    return torchvision.models.get_model(own, weights=None, **options)


def chosen(only: Iterable[str]) -> list[str]:
    """Names of the networks to measure, in the order of `NETWORKS`; all if `only` is empty.

    Raises:
        ValueError: a name is unknown, or its package is not installed.
    """
    names = set(only)
    for name in sorted(names):
        if name not in NETWORKS:
            nearest = ", ".join(difflib.get_close_matches(name, NETWORKS, n=3, cutoff=0))
            known = "scripts/bench/networks_list.py lists them all"
            raise ValueError(f"only={name}: there is no such network; the nearest names are {nearest}; {known}")
        if not installed(name):
            raise ValueError(f"only={name}: {package_of(name)} is not installed: pip install '.[networks]'")
    return [name for name in NETWORKS if name in names or not names]


def package_of(name: str) -> str:
    """The package that has a network."""
    return PACKAGES[name.rpartition("/")[0]]


def installed(name: str) -> bool:
    """Whether the package that has a network is installed."""
    return importlib.util.find_spec(package_of(name)) is not None


def blocks_of(network: nn.Module) -> list[nn.Module]:
    """The outermost modules that are blocks, in the order of the module tree."""
    if type(network).__name__ in BLOCKS:
        return [network]
    return [block for child in network.children() for block in blocks_of(child)]
