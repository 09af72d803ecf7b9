"""Data of several processes."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from engine.assemble import data
from engine.process.distributed import World
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


def test_class_weights_take_the_index_from_the_folder_that_is_given(monkeypatch):
    """The message about a folder that cannot be written advises this key, whatever the sampler is."""
    given = []
    index = SimpleNamespace(absent=lambda: [])
    monkeypatch.setattr(data, "index_classes", lambda *to, folder_key, **_: given.append((folder_key, *to)) or index)
    config = run_config("loss.class_weights=frequency", "sampler.folder=kept")
    assert config.sampler.name == "uniform"
    assert data.class_index(config, None, World(), None) is index and given == [("sampler.folder", None, "kept")]
