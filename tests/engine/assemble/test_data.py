"""Data of several processes."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from engine.assemble import data
from tests.runs import run_config


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_makes_the_class_index_before_the_others_read_it(rank, monkeypatch):
    order = []

    class World:
        first = rank == 0

        @contextmanager
        def first_goes_ahead(self):
            yield self.first
            order.append("all are here")

    index = SimpleNamespace(absent=lambda: [])
    monkeypatch.setattr(data, "index_classes", lambda *_, **__: order.append("read") or index)
    assert data.class_index(run_config("sampler=class_uniform"), None, World(), None) is index
    assert order == (["read", "all are here"] if rank == 0 else ["all are here", "read"])
