"""Train convolutions with groups and dilation in bfloat16 on a CPU, where PyTorch's own gradients are wrong.

In the memory format channels_last, the gradient of their weights is off by more than its own size, or NaN, if an image
has some 28 columns (torch 2.14, a processor with AVX-512; the contiguous format and float32 are right). Such layers are
the depthwise convolutions of MobileNets and EfficientNets at a stride below 32, and ResNeXt's grouped ones.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


def dilated_groups(network: nn.Module) -> list[str]:
    """Names of the convolutions with groups and dilation."""
    return [
        name
        for name, module in network.named_modules()
        if isinstance(module, nn.Conv2d) and module.groups > 1 and max(module.dilation) > 1
    ]


def correct_gradients(network: nn.Module) -> list[str]:
    """Correct the gradients of the network's `dilated_groups`.

    Returns the names of the convolutions that stay wrong: those with their own forward pass, with a padding mode other
    than zeros, or with padding given as a word.
    """
    left = []
    for name in dilated_groups(network):
        module = network.get_submodule(name)
        if type(module) is nn.Conv2d and module.padding_mode == "zeros" and not isinstance(module.padding, str):
            module.__class__ = DilatedGroups
        elif not isinstance(module, DilatedGroups):
            left.append(name)
    return left


class DilatedGroups(nn.Conv2d):
    """`nn.Conv2d` with zero padding, in the dtype of `torch.autocast`; second derivatives raise an error."""

    def forward(self, input: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return super().forward(input)
        weight = self.weight
        if torch.is_autocast_enabled(input.device.type):
            dtype = torch.get_autocast_dtype(input.device.type)
            input, weight = input.to(dtype), weight.to(dtype)
        result = _Convolution.apply(input, weight, self.stride, self.padding, self.dilation, self.groups)
        return result if self.bias is None else result + self.bias.to(result.dtype).view(-1, 1, 1)


class _Convolution(torch.autograd.Function):
    """A convolution that computes the gradient of its weight from contiguous copies; it saves input and weight."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, *geometry: Any) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.geometry = geometry
        return F.conv2d(input, weight, None, *geometry)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of input and weight, each only if it is needed."""
        stride, padding, dilation, groups = ctx.geometry

        def gradients(*tensors: Tensor, of: tuple[bool, bool, bool]) -> tuple[Tensor, ...]:
            geometry = (stride, padding, dilation, False, (0, 0), groups)
            return torch.ops.aten.convolution_backward(*tensors, None, *geometry, of)

        given = (gradient, *ctx.saved_tensors)
        of_input, *_ = gradients(*given, of=(True, False, False)) if ctx.needs_input_grad[0] else (None,)
        # Two strides of a depthwise weight fit both formats: `contiguous` would not change them.
        copies = (tensor.clone(memory_format=torch.contiguous_format) for tensor in given)
        _, of_weight, _ = gradients(*copies, of=(False, True, False)) if ctx.needs_input_grad[1] else (None,) * 3
        return of_input, of_weight, None, None, None, None
