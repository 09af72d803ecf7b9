"""Train convolutions with groups and dilation in bfloat16 on a CPU, where PyTorch's own gradients are wrong.

In the memory format channels_last, the gradient of their weights is off by more than its own size, or NaN, if an image
has some 28 columns (torch 2.14, a processor with AVX-512; the contiguous format and float32 are right). Such layers are
the depthwise convolutions of MobileNets and EfficientNets at a stride below 32, and those of ResNeXt.
"""

from typing import Any

import torch
from torch import Tensor, nn


def dilated_groups(network: nn.Module) -> list[str]:
    """Names of these convolutions. Compiled by TorchInductor, which chooses formats itself, they stay wrong."""
    return [name for name, module in network.named_modules() if _is_one(module)]


def _is_one(module: nn.Module) -> bool:
    return isinstance(module, nn.Conv2d) and module.groups > 1 and max(module.dilation) > 1


def run_contiguous(network: nn.Module) -> None:
    """Give these convolutions contiguous inputs in training passes; their results are channels_last as before.

    To be called when the network has its memory format. The copy of the input is kept for the backward pass, unless
    `recompute_activations` makes it again.
    """
    for module in filter(_is_one, network.modules()):
        # Two strides of a depthwise weight fit both formats: `contiguous` would not change them.
        module.weight.data = module.get_parameter("weight").data.clone(memory_format=torch.contiguous_format)
        module.register_forward_pre_hook(_contiguous)
        module.register_forward_hook(_channels_last)


def _contiguous(module: nn.Module, arguments: tuple[Tensor]) -> tuple[Tensor]:
    (x,) = arguments
    return (x.contiguous() if torch.is_grad_enabled() else x,)


def _channels_last(module: nn.Module, arguments: Any, result: Tensor) -> Tensor:
    return result.contiguous(memory_format=torch.channels_last)
