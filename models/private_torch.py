"""All private parts of PyTorch that the training uses, beside those of keepless (`keepless/torch_internals.py`).

Tested with torch 2.11.0 and 2.14.1. If one is missing, the import of this file says so, or a call.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.modules.batchnorm import _NormBase as NormBase
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as with_dispatch_modes_off
from torch.utils._pytree import tree_leaves, tree_map

from keepless.torch_internals import without_collection

ASSERT_SCALAR = torch.ops.aten._assert_scalar.default  # a guard of exported programs
ITEM = torch.ops.aten._local_scalar_dense.default  # `tensor.item()`

# RuntimeError with a message if a tensor () is 0. On CUDA nothing waits for it: a later call raises the error.
assert_on_device: Callable[[Tensor, str], None] = torch._assert_async
# The level of functorch's transforms, such as `torch.vmap`, where functions see wrapped tensors; None outside.
transform_level: Callable[[], int | None] = torch._C._functorch.maybe_current_level
# The Euclidean norms of many tensors, as scalars, by few kernels.
norms_of: Callable[[list], tuple[Tensor, ...]] = torch._foreach_norm


def move_towards(tensors: list[Tensor], ends: list[Tensor], share: Tensor | float) -> None:
    """tensors += share * (ends - tensors), in place, by few kernels.

    `share`: a number, or a scalar in float64 on their device, which costs a temporary copy of all tensors on CUDA.
    """
    if isinstance(share, Tensor) and share.is_cuda:  # a list of shares would launch a kernel for each tensor
        steps = list(torch._foreach_sub(ends, tensors))
        torch._foreach_mul_(steps, share.to(steps[0].dtype))
        torch._foreach_add_(tensors, steps)
    else:
        shares = [share.to(tensor.dtype) for tensor in tensors] if isinstance(share, Tensor) else share
        torch._foreach_lerp_(tensors, ends, shares)


@contextmanager
def capturing(stream: torch.cuda.Stream | None) -> Iterator[torch.cuda.CUDAGraph]:
    """Context that captures a CUDA graph. If that fails, memory, random numbers and the current stream are as before.

    PyTorch alone, if the capture cannot be ended, leaves `stream` current, the generator in its capture, and the
    graph's pool in use.
    """
    device = torch.cuda.current_device()
    previous_stream = torch.cuda.current_stream()
    generator = torch.cuda.default_generators[device]
    state = generator.clone_state()
    graph = torch.cuda.CUDAGraph()
    pool = torch.cuda.graph_pool_handle()
    try:
        # Other threads, which pin memory for the loader or write checkpoints, may go on.
        with without_collection(), torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"):
            yield graph
    except BaseException:
        torch.cuda.set_stream(previous_stream)
        generator.graphsafe_set_state(state)
        with suppress(RuntimeError):  # the capture was ended, and the graph will release its pool
            torch._C._cuda_endAllocateToPool(device, pool)
            torch._C._cuda_releasePool(device, pool)
        raise
