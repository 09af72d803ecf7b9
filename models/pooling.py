"""Max-pooling that saves a byte per result for the backward pass."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary

from models.private_torch import transform_level


class MaxPool2d(nn.MaxPool2d):
    """`nn.MaxPool2d`, bitwise identical, that saves each result's position in its window as one byte.

    PyTorch's saves its whole input, though the gradient reads only the shape, and an 8-byte index per result: 24
    bytes per result with stride 2 in float32. Before a WideResNet-38's stages that is a sixth of all saved bytes.

    Args:
        kernel_size: side of the windows, at most 16.
        stride, padding: as in `nn.MaxPool2d`.
    """

    kernel_size: int
    stride: int
    padding: int

    def __init__(self, kernel_size: int, stride: int, padding: int):
        super().__init__(kernel_size, stride, padding)
        if kernel_size > 16:
            raise ValueError(f"kernel_size={kernel_size}: expected at most 16, so that a position fits a byte")

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) -> (N, C, (H + 2 padding - kernel_size) // stride + 1, …)."""
        if not torch.is_grad_enabled() or not x.requires_grad or x.dim() != 4 or x.shape[3] < self.kernel_size:
            return super().forward(x)
        if torch.compiler.is_compiling():  # Inductor saves a byte itself
            return super().forward(x)
        if x.device.type not in ("cpu", "cuda") or torch.jit.is_tracing() or transform_level() is not None:
            return super().forward(x)
        return _pooled(x, self.kernel_size, self.stride, self.padding)


def _pooled(x: Tensor, size: int, stride: int, padding: int) -> Tensor:
    if has_torch_function_unary(x):  # a function mode, such as a recording, sees one call
        return handle_torch_function(_pooled, (x,), x, size, stride, padding)
    return _MaxPool.apply(x, size, stride, padding)


class _MaxPool(torch.autograd.Function):
    """`F.max_pool2d` of (N, C, H, W) that saves its results' positions in their windows, uint8 (N, C, h, w)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int, stride: int, padding: int) -> Tensor:
        window = ([size, size], [stride, stride], [padding, padding])
        z, places = torch.ops.aten.max_pool2d_with_indices.default(x, *window)
        width = x.shape[3]
        offsets = places.sub_(_corners(z, width, stride, padding)).int()  # row * width + column, in the window
        offsets.sub_(offsets.div(width, rounding_mode="trunc").mul_(width - size))  # row * size + column
        ctx.save_for_backward(offsets.to(torch.uint8))
        is_channels_last = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
        ctx.memory_format = torch.channels_last if is_channels_last else torch.contiguous_format
        ctx.shape = x.shape
        ctx.window = window
        return z

    @staticmethod
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
        (positions,) = ctx.saved_tensors
        (size, _), (stride, _), (padding, _) = ctx.window
        width = ctx.shape[3]
        cells = torch.arange(size, device=dz.device)
        offsets = (cells.unsqueeze(1) * width + cells).flatten().index_select(0, positions.flatten().int())
        places = offsets.view(dz.shape).add_(_corners(dz, width, stride, padding))
        x = torch.empty(ctx.shape, dtype=dz.dtype, device=dz.device, memory_format=ctx.memory_format)  # only its layout
        dx = torch.ops.aten.max_pool2d_with_indices_backward.default(dz, x, *ctx.window, [1, 1], False, places)
        return dx, None, None, None


def _corners(z: Tensor, width: int, stride: int, padding: int) -> Tensor:
    """Index of the upper left cell of each window in a map of this width, (h, w); negative in the padding."""
    rows, columns = (torch.arange(side, device=z.device) * stride - padding for side in z.shape[2:])
    return rows.unsqueeze(1) * width + columns
