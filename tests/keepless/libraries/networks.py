"""Small networks of libraries, from configurations: nothing is downloaded.

Each function returns a network and a function that draws the inputs of a step: keyword arguments, or one tensor.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Inputs = Tensor | dict[str, Any]
Made = tuple[nn.Module, Callable[[], Inputs]]

WORDS = 99
SMALL = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 128}
CAUSAL = SMALL | {"vocab_size": WORDS, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0}


def images(number: int = 2, size: int = 64, channels: int = 3) -> Tensor:
    return torch.randn(number, channels, size, size)


def texts(number: int = 4, length: int = 48) -> dict[str, Any]:
    """Random words, which are also what a language model is to predict."""
    words = torch.randint(1, WORDS, (number, length))
    return {"input_ids": words, "labels": words}


def pixels(size: int = 64) -> dict[str, Any]:
    return {"pixel_values": images(size=size)}


# Transformers


def llama() -> Made:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**CAUSAL)), texts


def qwen() -> Made:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**CAUSAL)), texts


def mixtral() -> Made:
    """Each expert gets another number of tokens in each step."""
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(num_local_experts=4, num_experts_per_tok=2, **CAUSAL)), texts


def bert() -> Made:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(vocab_size=WORDS, **SMALL)), texts


def t5() -> Made:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=WORDS, d_model=64, d_kv=16, d_ff=128, num_layers=3, num_heads=4, decoder_start_token_id=0
    )
    return T5ForConditionalGeneration(config), texts


def whisper() -> Made:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    size = {f"{half}_{name}": number for half in ("encoder", "decoder") for name, number in SIZES.items()}
    special = dict.fromkeys(["pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"], 0)
    lengths = {"max_source_positions": 64, "max_target_positions": 32}
    config = WhisperConfig(
        vocab_size=WORDS, num_mel_bins=16, d_model=64, begin_suppress_tokens=None, **size, **special, **lengths
    )
    sounds = lambda: {"input_features": torch.randn(2, 16, 128), "labels": torch.randint(1, WORDS, (2, 24))}  # noqa: E731
    return WhisperForConditionalGeneration(config), sounds


SIZES = {"layers": 3, "attention_heads": 4, "ffn_dim": 128}


def vit() -> Made:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(image_size=64, patch_size=8, **SMALL)), pixels


def segformer() -> Made:
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    return SegformerForSemanticSegmentation(SegformerConfig(num_labels=5, hidden_sizes=[16, 32, 64, 64])), pixels


def upernet() -> Made:
    from transformers import ConvNextConfig, UperNetConfig, UperNetForSemanticSegmentation

    backbone = ConvNextConfig(hidden_sizes=[16, 32, 64, 64], depths=[1, 1, 2, 1], out_features=STAGES)
    config = UperNetConfig(backbone_config=backbone, hidden_size=32, auxiliary_channels=16, num_labels=5)
    return UperNetForSemanticSegmentation(config), partial(pixels, 96)


STAGES = ["stage1", "stage2", "stage3", "stage4"]


def mamba() -> Made:
    from transformers import MambaConfig, MambaForCausalLM

    return MambaForCausalLM(MambaConfig(vocab_size=WORDS, hidden_size=64, state_size=8, num_hidden_layers=3)), partial(
        texts, 4, 24
    )


# PEFT


def adapted(network: nn.Module, *configs: Any) -> nn.Module:
    """A network with an adapter for each configuration, named first, second, …; the first is in use."""
    from peft import get_peft_model

    network = get_peft_model(network, configs[0], "first")
    for name, config in zip(["second", "third"], configs[1:], strict=False):
        network.add_adapter(name, config)
    return network


def lora(number: int = 1, **options: Any) -> Made:
    from peft import LoraConfig

    network, draw = llama()
    configs = [LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"], **options) for _ in range(number)]
    return adapted(network, *configs), draw


def ia3() -> Made:
    from peft import IA3Config

    network, draw = llama()
    config = IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"])
    return adapted(network, config), draw


def prompt_tuning() -> Made:
    from peft import PromptTuningConfig, TaskType

    network, draw = llama()
    return adapted(network, PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=8)), draw


def resnet() -> Made:
    """torchvision's ResNet-50."""
    from torchvision.models import resnet50

    return resnet50(num_classes=10), partial(images, 4, 160)


def lora_of_convolutions() -> Made:
    """LoRA with dropout on all convolutions of a ResNet-50."""
    from peft import LoraConfig

    network, draw = resnet()
    names = [name for name, module in network.named_modules() if isinstance(module, nn.Conv2d)]
    return adapted(network, LoraConfig(r=8, lora_dropout=0.1, target_modules=names)), draw


# diffusers

HALVES = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
CROSSED = {
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
}


def unet() -> Made:
    from diffusers import UNet2DModel

    network = UNet2DModel(32, block_out_channels=(32, 64), norm_num_groups=8, **HALVES)
    return network, lambda: {"sample": images(size=32), "timestep": torch.randint(1000, (2,))}


def conditioned_unet() -> Made:
    from diffusers import UNet2DConditionModel

    network = UNet2DConditionModel(
        32, block_out_channels=(32, 64), norm_num_groups=8, cross_attention_dim=32, attention_head_dim=8, **CROSSED
    )
    noisy = lambda: {"sample": images(size=32, channels=4), "timestep": torch.randint(1000, (2,))}  # noqa: E731
    return network, lambda: noisy() | {"encoder_hidden_states": torch.randn(2, 8, 32)}


def dit() -> Made:
    from diffusers import DiTTransformer2DModel

    network = DiTTransformer2DModel(4, 16, 4, num_layers=3, sample_size=16, num_embeds_ada_norm=10, norm_num_groups=8)
    drawn = lambda: {"timestep": torch.randint(1000, (2,)), "class_labels": torch.randint(10, (2,))}  # noqa: E731
    return network, lambda: {"hidden_states": images(2, 16, 4)} | drawn()


def vae() -> Made:
    """Encodes, draws of the latent distribution, and decodes."""
    from diffusers import AutoencoderKL

    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    network = AutoencoderKL(block_out_channels=(16, 32), norm_num_groups=8, layers_per_block=1, **blocks)
    return network, lambda: {"sample": images(size=32), "sample_posterior": True}


# timm, segmentation_models_pytorch


def timm(name: str, size: int = 64, **options: Any) -> Made:
    from timm import create_model

    return create_model(name, num_classes=5, **options), partial(images, size=size)


def smp(decoder: str) -> Made:
    """A decoder on the first stages of a ResNet-18, or on all where it needs them."""
    import segmentation_models_pytorch

    options = DECODERS.get(decoder, {"encoder_depth": 3})
    network = getattr(segmentation_models_pytorch, decoder)("resnet18", encoder_weights=None, classes=3, **options)
    return network, images


NARROW = {"encoder_depth": 3, "decoder_channels": (64, 32, 16)}
DECODERS = {"Unet": NARROW, "UnetPlusPlus": NARROW, "MAnet": NARROW}


# Lightning, Accelerate


def lightning() -> Made:
    from lightning import LightningModule

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network, _ = timm("test_resnet")

        def forward(self, x: Tensor) -> Tensor:
            return self.network(x)

    return Module(), images


def accelerated(**options: Any) -> Made:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state()  # another test of this process may have set its precision
    network, draw = llama()
    return Accelerator(cpu=True, **options).prepare(network), draw


# What code of libraries does, alone


class Experts(nn.Module):
    """Each token goes to one of four experts. How many each gets depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(32, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:  # (tokens, 32)
        gates, chosen = self.router(x).softmax(1).max(1)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            x = x.index_add(0, rows, expert(x[rows]) * gates[rows, None])
        return x


def experts() -> Made:
    return nn.Sequential(*(Experts() for _ in range(4))), partial(torch.randn, 512, 32)


class Emptied(nn.Module):
    """Blocks on the way down fill a list, blocks on the way up empty it."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Conv2d(3 if number == 0 else 8, 8, 3, padding=1) for number in range(3))
        self.up = nn.ModuleList(nn.Conv2d(16, 8, 3, padding=1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        skips: list[Tensor] = []
        for layer in self.down:
            skips.append(x := F.silu(layer(x)))
        for layer in self.up:
            x = F.silu(layer(torch.cat([x, skips.pop()], 1)))
        return x.mean(1)


def emptied_list() -> Made:
    return Emptied(), images


class Gated(nn.Module):
    """Reads an attribute that exists only during its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.layer(x)) * self.gate


def set_gate(module: nn.Module, args: tuple[Tensor]) -> None:
    module.gate = args[0].mean(1, keepdim=True).sigmoid()


def clear_gate(module: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
    del module.gate


def attribute_of_hooks() -> Made:
    network = nn.Sequential(*(Gated() for _ in range(6)))
    for module in network:
        module.register_forward_pre_hook(set_gate)
        module.register_forward_hook(clear_gate)
    return network, partial(torch.randn, 256, 32)
