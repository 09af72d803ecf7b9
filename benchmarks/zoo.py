"""The networks that `networks` measures, from torchvision, timm, segmentation_models_pytorch and Hugging Face."""

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torchvision
from torch import Tensor, nn

from keepless.torch_internals import tree_leaves

Forward = Callable[[Tensor], object]  # inputs -> tensors, maybe in containers

NETWORKS = (
    *("alexnet", "vgg16_bn", "squeezenet1_1", "googlenet", "inception_v3"),
    *("resnet18", "resnet50", "resnet101", "resnext50_32x4d", "wide_resnet50_2", "densenet121", "densenet169"),
    *("mobilenet_v2", "mobilenet_v3_small", "mobilenet_v3_large", "mnasnet1_0", "shufflenet_v2_x1_0"),
    *("regnet_x_400mf", "regnet_y_400mf", "efficientnet_b0", "efficientnet_v2_s"),
    *("convnext_tiny", "swin_t", "swin_v2_t", "vit_b_16", "maxvit_t"),
    *("fcn_resnet50", "deeplabv3_resnet50", "deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large"),
    *("timm/densenet121", "timm/efficientnet_b0", "timm/mobilenetv4_conv_small", "timm/convnextv2_atto"),
    *("timm/vit_small_patch16_224", "smp/Unet-resnet34", "smp/FPN-resnet50", "smp/DeepLabV3Plus-mobilenet_v2"),
    *("transformers/Llama", "peft/Llama", "transformers/Mixtral", "diffusers/UNet2DModel"),
)
PACKAGES = {"": "torchvision", "timm": "timm", "smp": "segmentation_models_pytorch"}  # by the part before the slash
PACKAGES |= {package: package for package in ("transformers", "peft", "diffusers")}
WORDS = 4096
LANGUAGE = {"vocab_size": WORDS, "hidden_size": 256, "num_hidden_layers": 8, "num_attention_heads": 8}
LANGUAGE |= {"num_key_value_heads": 8, "use_cache": False}  # of a small language model
OPTIONS: dict[str, dict[str, Any]] = {
    "transformers/Llama": {"intermediate_size": 704},
    "transformers/Mixtral": {"intermediate_size": 352, "num_local_experts": 4},
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
    ConvNeXtBlock Block UnetDecoderBlock FPNBlock TransformerEncoderLayer LlamaDecoderLayer MixtralDecoderLayer
    ResnetBlock2D Attention
    """.split()
)


def build(name: str, size: int) -> nn.Module:
    """A network of `NETWORKS` for square images of `size` pixels. ModuleNotFoundError: its package is not installed."""
    package, _, plain_name = name.rpartition("/")
    options = OPTIONS.get(name, {}) | SIZED.get(name, lambda size: {})(size)
    module: Any = importlib.import_module(PACKAGES[package])
    if package == "timm":
        return module.create_model(plain_name, pretrained=False, **options)
    if package == "smp":
        architecture, _, encoder = plain_name.partition("-")
        return getattr(module, architecture)(encoder, encoder_weights=None, classes=19, **options)
    if package == "transformers":
        config = getattr(module, f"{plain_name}Config")(**LANGUAGE, **options)
        return getattr(module, f"{plain_name}ForCausalLM")(config)
    if package == "peft":  # LoRA on a frozen base
        base = build(f"transformers/{plain_name}", size)
        return module.get_peft_model(base, module.LoraConfig(task_type="CAUSAL_LM"))
    if package == "diffusers":
        return Denoiser(getattr(module, plain_name)(size, block_out_channels=(32, 64, 64, 128)))
    return torchvision.models.get_model(plain_name, weights=None, **options)


def build_with_inputs(name: str, device: str, images: int, size: int) -> tuple[nn.Module, Tensor]:
    """A network with random weights on the device, and images (N, 3, size, size), or texts of words (N, size).

    Weights that start at zero would make all gradients before them zero, so they are random too.
    """
    torch.manual_seed(0)
    network = build(name, size)
    with torch.no_grad():
        for parameter in network.parameters():
            if not parameter.any():
                parameter.normal_(std=0.02)
    if name.startswith(("transformers/", "peft/")):
        return network.to(device), torch.randint(WORDS, (images, size), device=device)
    return network.to(device), torch.randn(images, 3, size, size, device=device)


def blocks_of(network: nn.Module) -> list[nn.Module]:
    """The outermost modules that are blocks, in the order of the module tree."""
    if type(network).__name__ in BLOCK_NAMES:
        return [network]
    return [block for child in network.children() for block in blocks_of(child)]


class Denoiser(nn.Module):
    """A diffusion model's network, with one time step for each image."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> object:
        return self.network(images, torch.arange(len(images), device=images.device))


class WithLoss(nn.Module):
    """A network and its loss in one module, so that a plan counts the loss, which may dominate in segmentation."""

    def __init__(self, network: nn.Module, forward: Forward | None = None):
        super().__init__()
        self.network = network
        self.run = network if forward is None else forward

    def forward(self, inputs: Tensor) -> Tensor:
        """The sum of the outputs' mean squares: a loss for any network."""
        return torch.stack([output.square().mean() for output in tree_leaves(self.run(inputs))]).sum()
