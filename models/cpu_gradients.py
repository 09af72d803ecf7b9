"""Train convolutions on a CPU whose weights' gradients PyTorch computes wrongly in the memory format channels_last.

Groups and dilation in bfloat16: the gradient is off by more than its own size, or NaN, if an image has some 28 columns
(torch 2.14, a processor with AVX-512). Such layers are the depthwise convolutions of MobileNets and EfficientNets at a
stride below 32, and ResNeXt's grouped ones.

1x1 kernels with a stride and fewer input channels than a vector has numbers (8 with AVX2, 16 with AVX-512) in float32:
oneDNN writes outside of its buffers, and the process is killed sooner or later (oneDNN#6035). timm's RepVGG begins with
one. In the contiguous format both are right.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

KINDS = {"bfloat16": "a dilated convolution with groups", "float32": "a 1x1 convolution with a stride"}  # by precision
_VECTOR = 16  # float32 numbers


def wrong_gradients(network: nn.Module, precision: str) -> list[str]:
    """Names of the convolutions whose gradients are wrong in float32 or bfloat16, see above."""

    def is_wrong(conv: nn.Conv2d) -> bool:
        if precision == "bfloat16":
            return conv.groups > 1 and max(conv.dilation) > 1
        is_strided = conv.kernel_size == (1, 1) and max(conv.stride) > 1
        return precision == "float32" and is_strided and conv.groups == 1 and 1 < conv.in_channels < _VECTOR

    return [name for name, module in network.named_modules() if isinstance(module, nn.Conv2d) and is_wrong(module)]


def correct_gradients(network: nn.Module, precision: str) -> list[str]:
    """Correct the gradients of the network's `wrong_gradients`.

    Returns the names of the convolutions that stay wrong: those with their own forward pass, with a padding mode other
    than zeros, or with padding given as a word.
    """
    uncorrected = []
    for name in wrong_gradients(network, precision):
        module = network.get_submodule(name)
        if type(module) is nn.Conv2d and module.padding_mode == "zeros" and not isinstance(module.padding, str):
            module.__class__ = FromCopies
        elif not isinstance(module, FromCopies):
            uncorrected.append(name)
    return uncorrected


class FromCopies(nn.Conv2d):
    """`nn.Conv2d` with zero padding, in the dtype of `torch.autocast`; second derivatives raise an error."""

    def forward(self, input: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return super().forward(input)
        weight = self.weight
        if torch.is_autocast_enabled(input.device.type):
            dtype = torch.get_autocast_dtype(input.device.type)
            input = input.to(dtype)
            weight = weight.to(dtype)
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
        geometry = (None, stride, padding, dilation, False, (0, 0), groups)
        operands = (gradient, *ctx.saved_tensors)
        input_gradient = None
        weight_gradient = None
        if ctx.needs_input_grad[0]:
            input_gradient, _, _ = torch.ops.aten.convolution_backward(*operands, *geometry, (True, False, False))
        if ctx.needs_input_grad[1]:
            # Two strides of a depthwise weight fit both formats: `contiguous` would not change them.
            copies = (tensor.clone(memory_format=torch.contiguous_format) for tensor in operands)
            _, contiguous, _ = torch.ops.aten.convolution_backward(*copies, *geometry, (False, True, False))
            weight_gradient = torch.empty_like(operands[2]).copy_(
                contiguous
            )  # as the weight, which DDP's buckets expect
        return input_gradient, weight_gradient, None, None, None, None
