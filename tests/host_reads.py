"""Counts, on a CPU, where code would make the host wait for a GPU.

A read is a tensor's value on the host (`item`, `tolist`, `numpy`, `cpu`, its truth), or an operator that needs one: its
result has a size that depends on values (`nonzero`, boolean masks), or its CUDA version looks at them (`bincount`).
Numbers that are copied to the device make the host wait too: `torch.tensor(…, device=…)`, `torch.where` with a number.
This cannot see the wait of `to(device)` without `non_blocking`.

On a CPU nothing tells a tensor of the device from one of the host, except how it was made: `torch.tensor(…)` without a
device is the host's, such as a flag for the other processes. Reading it is no read, unless through a view or a result.
"""

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

REPOSITORY = Path(__file__).resolve().parent.parent

METHODS = ("tolist", "numpy", "cpu", "to", "__array__")  # on a CPU these call no operator
VALUES_NEEDED = {
    "_local_scalar_dense",
    *("item", "is_nonzero", "allclose", "argwhere"),  # in inference mode these arrive whole
    *("equal", "nonzero", "masked_select", "bincount", "histc", "repeat_interleave"),
    *("_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive"),
}
MASKS = (torch.bool, torch.uint8)


@contextmanager
def host_reads() -> Iterator[list[str]]:
    """Yields a list that gets "FILE:LINE FUNCTION: READ" at each read; the line is the innermost in the repository."""
    counted, make, choose = _Reads(), torch.tensor, torch.where

    @functools.wraps(make)
    def tensor(*args: Any, **options: Any) -> Tensor:
        tensor = make(*args, **options)
        if options.get("device") is None:
            counted.of_the_host[tensor] = True
        else:
            counted.count("torch.tensor on the device")
        return tensor

    @functools.wraps(choose)
    def where(*args: Any, **options: Any) -> Any:
        if any(isinstance(value, (int, float)) for value in args):
            counted.count("torch.where with a number")
        return choose(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "tensor", tensor)
        patch.setattr(torch, "where", where)
        for name in METHODS:
            patch.setattr(Tensor, name, counted.method(name))
        with counted:
            yield counted.reads


class _Reads(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.reads: list[str] = []
        self.of_the_host = WeakIdKeyDictionary()
        self.within = False  # a method that is counted already

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.within and needs_values(operator, args) and args[0] not in self.of_the_host:
            self.count(operator._schema.name.removeprefix("aten::"))
        return operator(*args, **(kwargs or {}))

    def method(self, name: str) -> Callable:
        original = getattr(Tensor, name)

        @functools.wraps(original)
        def counted(tensor: Tensor, *args: Any, **options: Any) -> Any:
            # Code moves tensors to the host by `to("cpu")`; `to(device)` is a move to the device.
            to_host = "cpu" in (*args[:1], options.get("device")) and not options.get("non_blocking")
            of_another_thread = threading.current_thread() is not threading.main_thread()
            if of_another_thread or self.within or tensor in self.of_the_host or (name == "to" and not to_host):
                return original(tensor, *args, **options)
            self.count(f"Tensor.{name}")
            self.within = True
            try:
                return original(tensor, *args, **options)
            finally:
                self.within = False

        return counted

    def count(self, read: str) -> None:
        if threading.current_thread() is threading.main_thread():  # others may wait
            self.reads.append(f"{_line()}: {read}")


def needs_values(operator: Any, args: tuple) -> bool:
    """Whether the CUDA version of an operator makes the host wait."""
    name = operator._schema.name.removeprefix("aten::")
    if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
        masked = any(index is not None and index.dtype in MASKS for index in args[1])
        return masked and (name == "index" or args[2].numel() > 1)  # one value fills a mask without a wait
    if name == "where":
        return len(args) == 1
    return name in VALUES_NEEDED


def _line() -> str:
    """The innermost line of the repository's own code outside this file."""
    frame = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(REPOSITORY) and path != Path(__file__) and ".venv" not in path.parts:
            return f"{path.relative_to(REPOSITORY)}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "elsewhere"
