"""Contexts and backends of `torch.compile` for the benchmarks, from PyTorch's private configuration."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, fx

from keepless.torch_internals import FakeTensorMode, TorchDispatchMode


def compiler_settings(**settings: Any) -> AbstractContextManager:
    """Context with other settings of `torch.compile`, such as `recompile_limit`."""
    return torch._dynamo.config.patch(**settings)


class _NothingDrawn(TorchDispatchMode):
    """Refuses operators that draw random numbers."""

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in function.tags:
            names = [argument.name for argument in function._schema.arguments]
            values = dict(zip(names, args, strict=False)) | (kwargs or {})
            if "dropout_p" not in names or values.get("dropout_p"):  # without dropout, attention draws nothing
                raise ValueError(f"{function} draws random numbers: gradients would be wrong on CPUs, so give budget=1")
        return function(*args, **(kwargs or {}))


def compile_within(graph: fx.GraphModule, inputs: list[Any], compiler: str, budget: float) -> Callable[..., Any]:
    """Compile a graph with a backend of `torch.compile` that keeps a share of the activations.

    ValueError: the share is below 1, and the graph draws random numbers (pytorch/pytorch#190758).
    """
    if budget < 1:
        with FakeTensorMode() as fakes, _NothingDrawn():
            graph(*[fakes.from_tensor(value) if isinstance(value, Tensor) else value for value in inputs])
    from torch._functorch import config  # `import torch` alone does not load it

    with config.patch(activation_memory_budget=budget):
        return torch._dynamo.lookup_backend(compiler)(graph, inputs)
