"""Configuration keys -> norms, bodies, forward passes and their arithmetic."""

import os
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from datasets.stored import COLOURS
from engine.assemble.contracts import builder
from engine.process.console import logger
from engine.schema import network as schema
from engine.schema.training import Trainer, TrainingRun
from models import bodies
from models.forward import Forward


def norm_act(config: schema.Norm) -> Callable[[int], nn.Module]:
    """Return a function: channels -> norm and activation. A momentum of None is `schema.MOMENTUM` here.

    ValueError: see `builder`; or, when it is called, the norm refuses its channels or activation.
    """
    build = partial(builder("norm", config), momentum=config.momentum or schema.MOMENTUM)

    def make(channels: int, activation: str | None = config.activation) -> nn.Module:
        try:
            return build(channels, activation=activation)
        except (ValueError, TypeError, LookupError, AttributeError, AssertionError, NotImplementedError) as error:
            problem = f"{type(error).__name__}: {error}"
            arguments = f"{channels} channels, activation={activation}"
            raise ValueError(f"norm={config.name} of {arguments}: {problem}") from error

    return make


def body(
    config: schema.Body,
    norm: Callable[[int], nn.Module],
    classes: int = 0,
    own_momentum: bool = False,
    channels: int = 3,
) -> bodies.Body:
    """Build the body: images of `channels` -> features, or logits if `classes` is above 0.

    `own_momentum`: see `LibraryBody`. ValueError: see `builder`; or the body takes three channels only.
    """
    extra: dict[str, int] = {}
    if config.in_library:
        extra["own_momentum"] = own_momentum
    if channels != COLOURS:  # bodies of one's own may not take it
        extra["in_channels"] = channels
    return builder("body", config, [*extra])(norm, classes=classes, output_stride=config.output_stride, **extra)


def forward(config: TrainingRun, network: nn.Module, device: torch.device) -> Forward:
    """A forward pass through `network`, moved to `device`, with the run's normalisation and precision."""
    memory_format = torch.channels_last if config.trainer.channels_last else torch.contiguous_format
    mean, std = (torch.tensor(values, device=device).view(1, -1, 1, 1) * 255 for values in config.data.normalisation())
    dtype = getattr(torch, config.trainer.precision)
    low = torch.bfloat16 if dtype == torch.float32 else dtype  # autocast refuses float32, which needs none
    autocast = partial(torch.autocast, device.type, low, enabled=dtype != torch.float32)
    network = network.to(device, memory_format=memory_format)  # type: ignore[call-overload]  # torch's hints lack it
    emulates = device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False)
    if dtype == torch.bfloat16 and emulates:
        logger.warning("precision=bfloat16: this device only emulates it, which takes longer: give float16 or float32")
    if config.trainer.precision == "float16":
        overflow = "precision=float16 overflows: use bfloat16 or float32"
    else:
        overflow = f"the network's values are too large even for precision={config.trainer.precision}"
    return Forward(network, mean, std, memory_format, autocast, overflow, config.evaluation_memory_advice)


def arithmetic(config: Trainer, fixed_sizes: bool = False) -> None:
    """Set this process's TF32 and determinism. `fixed_sizes`: cuDNN looks for the fastest kernels per size."""
    torch.backends.cuda.matmul.allow_tf32 = config.tf32
    torch.backends.cudnn.allow_tf32 = config.tf32
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS requires it
    torch.use_deterministic_algorithms(config.deterministic)
    # A debugging aid that fills every new tensor.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # it is a property
    torch.backends.cudnn.benchmark = fixed_sizes and not config.deterministic
