"""Workspaces of recurrent layers, which fake tensors do not show."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ...saved import TensorSpec
from ...torch_internals import OpOverload
from .costs import Operator, operator_of, results_of

# Recurrent layers that save a workspace (of bytes) for their backward pass. It is empty if tensors are fake.
WITH_WORKSPACE = frozenset(["mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn"])
_SAMPLE = 32  # time steps and sequences, at most, of which bytes are measured


def with_workspace(function: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> Any:
    """An operator's result on fake tensors, but a workspace has the size that it has on real ones.

    Raises ValueError if the layer does not run on real tensors here.
    """
    if function.overloadpacket.__name__ not in WITH_WORKSPACE:
        return result
    size = _workspace_bytes(operator_of(function, args, kwargs))
    if size is None:
        raise ValueError(
            f"{function} keeps a workspace whose size only real tensors tell, and it does not run on this machine's "
            f"{args[0].device}: count the step on the CPU, or on a machine that trains it"
        )
    return tuple(tensor.new_empty(size) if tensor.dtype is torch.uint8 else tensor for tensor in result)


def _workspace_bytes(operator: Operator | None) -> int | None:
    """Bytes of a layer's workspace; None if it does not run here.

    On the CPU few time steps and sequences are run: the bytes grow with both, by up to 2 % less.
    """
    if operator is None or (operator.device.type == "cuda" and not torch.cuda.is_available()):
        return None
    sizes = operator.arguments[0].shape[:2]
    sample = operator
    sample_sizes = sizes
    if operator.device.type == "cpu":
        sample_sizes = torch.Size(max(1, min(size, _SAMPLE)) for size in sizes)
        sample = _resized_layer(operator, *sample_sizes)
    results = results_of(sample)
    if results is None:
        return None
    sample_bytes = sum(spec.size for spec in results if spec.dtype is torch.uint8)
    return sample_bytes * sizes.numel() // sample_sizes.numel()


def _resized_layer(operator: Operator, steps: int, sequences: int) -> Operator:
    """oneDNN's layer on so many time steps and sequences."""
    arguments = list(operator.arguments)
    for i, argument in enumerate(arguments):
        is_weight = 1 <= i <= 4
        if isinstance(argument, TensorSpec) and not is_weight:
            shape = (steps, sequences, argument.shape[-1])[-len(argument.shape) :]
            resized = torch.empty(shape, device="meta")
            arguments[i] = replace(argument, shape=resized.shape, stride=resized.stride())
    return operator._replace(arguments=tuple(arguments))
