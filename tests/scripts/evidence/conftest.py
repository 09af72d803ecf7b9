"""Benchmarks measure in this process."""

import pytest

from scripts.evidence import training
from scripts.reports import frame
from tests.scripts.evidence.records import here


@pytest.fixture
def in_process(monkeypatch) -> None:
    monkeypatch.setattr(frame, "Elsewhere", here)
    monkeypatch.setattr(training, "Elsewhere", here)
    monkeypatch.setattr(frame, "keep_freed_memory", lambda: True)
