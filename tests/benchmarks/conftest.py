"""Benchmarks' trainings are measured in this process."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from benchmarks import frame, steps


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    """Benchmarks set PyTorch's threads. With more of them, convolutions of later tests take more memory."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def in_process(monkeypatch) -> None:
    monkeypatch.setattr(steps, "process", this_process)
    monkeypatch.setattr(frame, "keep_freed_memory", lambda: True)


def this_process(threads: int) -> AbstractContextManager:
    """`benchmarks.measuring.process` without a process."""
    return nullcontext(SimpleNamespace(submit=lambda *call: SimpleNamespace(result=partial(*call))))
