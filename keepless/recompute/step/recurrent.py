"""Workspaces and temporary memory of recurrent layers, which fake tensors do not show."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ...saved import TensorSpec
from ...torch_internals import OpOverload
from .costs import Operator, cost_of, measure, operator_of, results_of

# Recurrent layers that save a workspace (of bytes) for their backward pass. It is empty if tensors are fake.
WITH_WORKSPACE = frozenset(["mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn"])
_SAMPLE = 32  # time steps or sequences: bytes are extrapolated from so many and twice as many


def with_workspace(function: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> Any:
    """An operator's result on fake tensors, but a workspace has the size that it has on real ones.

    Raises ValueError if the layer does not run on real tensors here.
    """
    if function.overloadpacket.__name__ not in WITH_WORKSPACE:
        return result
    size = _extrapolated_bytes(operator_of(function, args, kwargs), _workspace_bytes)
    if size is None:
        raise ValueError(
            f"{function} keeps a workspace whose size only real tensors tell, and it does not run on this machine's "
            f"{args[0].device}: count the step on the CPU, or on a machine that trains it"
        )
    return tuple(tensor.new_empty(size) if tensor.dtype is torch.uint8 else tensor for tensor in result)


def temporaries_of(function: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    """Temporary bytes of a recurrent layer, forward or backward, on tensors that may be fake; 0 for other operators."""
    if function.overloadpacket.__name__.removesuffix("_backward") not in WITH_WORKSPACE:
        return 0
    return _extrapolated_bytes(operator_of(function, args, kwargs), _temporary_bytes) or 0


def _extrapolated_bytes(operator: Operator | None, bytes_of: Callable[[Operator], int | None]) -> int | None:
    """Bytes of a recurrent layer.

    On the CPU they grow linearly with the time steps and the sequences, so few of both are measured.
    """
    if operator is None or (operator.arguments[0].device.type == "cuda" and not torch.cuda.is_available()):
        return None
    steps, sequences = operator.arguments[0].shape[:2]
    if operator.device.type != "cpu" or max(steps, sequences) <= 2 * _SAMPLE:
        return bytes_of(operator)
    is_long = steps > 2 * _SAMPLE
    size = steps if is_long else sequences
    samples = [
        _resized_layer(operator, count, sequences) if is_long else _resized_layer(operator, steps, count)
        for count in (_SAMPLE, 2 * _SAMPLE)
    ]
    small, large = (_extrapolated_bytes(sample, bytes_of) for sample in samples)
    return None if small is None or large is None else small + (large - small) * (size - _SAMPLE) // _SAMPLE


def _resized_layer(operator: Operator, steps: int, sequences: int) -> Operator:
    """oneDNN's layer, forward or backward, on so many time steps and sequences."""
    shape: tuple[int, ...]
    arguments = list(operator.arguments)
    for i, argument in enumerate(arguments):
        is_weight = 1 <= i <= 4
        if isinstance(argument, TensorSpec) and not is_weight:
            if argument.dtype is torch.uint8:
                shape = (_workspace_bytes(_forward_of(arguments)) or 0,)
            else:
                shape = (steps, sequences, argument.shape[-1])[-len(argument.shape) :]
            resized = torch.empty(shape, device="meta")
            arguments[i] = replace(argument, shape=resized.shape, stride=resized.stride())
    return operator._replace(arguments=tuple(arguments))


def _forward_of(arguments: Sequence[Any]) -> Operator:
    """oneDNN's forward layer, from the arguments of its backward pass."""
    reverse, *sizes, train, bidirectional, batches, batch_first = arguments[13:-1]
    forward = (*arguments[:7], reverse, batches, *sizes, bidirectional, batch_first, train)
    return Operator(torch.ops.aten.mkldnn_rnn_layer.default, forward, ())


def _workspace_bytes(operator: Operator) -> int | None:
    results = results_of(operator)
    return None if results is None else sum(spec.size for spec in results if spec.dtype is torch.uint8)


def _temporary_bytes(operator: Operator) -> int | None:
    measure([operator])
    cost = cost_of(operator)
    return None if cost is None else cost.temporaries
