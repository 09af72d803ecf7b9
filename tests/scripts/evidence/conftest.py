"""Benchmarks measure in this process."""

from collections.abc import Iterator

import pytest
import torch

from scripts.evidence import training
from scripts.reports import frame
from tests.scripts.evidence.records import here


@pytest.fixture
def in_process(monkeypatch) -> Iterator[None]:
    monkeypatch.setattr(frame, "Elsewhere", here)
    monkeypatch.setattr(training, "Elsewhere", here)
    monkeypatch.setattr(frame, "keep_freed_memory", lambda: True)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)  # which benchmarks set: convolutions of more threads take more memory
