"""The host's work for the Triton kernels, on a machine without a GPU: everything but the launches."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch

from keepless import triton_launch
from keepless.norms.backends import triton_kernels
from keepless.torch_internals import TritonBinary


@contextmanager
def launches_left_out() -> Iterator[None]:
    """Context in which backend="triton" takes tensors on the CPU, and computes nothing: z and gradients are undefined.

    Kernels count as compiled, and calling a binary returns at once. On a GPU each launch takes the driver's own time
    too, as each of PyTorch's launches does.
    """
    binary = TritonBinary(lambda *arguments: None, function=0, metadata=None, registers=64, shared=0)
    with ExitStack() as patches:
        for owner, name, value in (
            (triton_kernels, "runs_on", lambda x: True),
            (triton_launch, "current_stream", lambda device: 0),
            (triton_launch.Launch, "_load", lambda launch, examples: binary),
            (triton_launch.Launch, "resident", None),
            (torch.cuda, "current_device", lambda: None),  # the index of the CPU's torch.device
        ):
            patches.enter_context(patch.object(owner, name, value))
        yield
