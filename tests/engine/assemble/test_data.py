"""Data of several processes."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from engine.assemble import data
from engine.process import distributed
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

    index = SimpleNamespace(absent_classes=lambda: [])
    monkeypatch.setattr(data, "index_classes", lambda *_, **__: order.append("read") or index)
    assert data.class_index(run_config("sampler=class_uniform"), None, World(), None) is index
    assert order == (["read", "all are here"] if rank == 0 else ["all are here", "read"])


def test_class_weights_take_the_index_from_the_folder_that_is_given(monkeypatch):
    """The message about a folder that cannot be written advises this key, whatever the sampler is."""
    calls = []
    index = SimpleNamespace(absent_classes=lambda: [])
    monkeypatch.setattr(data, "index_classes", lambda *to, folder_key, **_: calls.append((folder_key, *to)) or index)
    config = run_config("loss.class_weights=frequency", "sampler.folder=kept")
    assert config.sampler.name == "uniform"
    assert data.class_index(config, None, World(), None) is index and calls == [("sampler.folder", None, "kept")]


@pytest.mark.parametrize(
    "cores, limit, local_ranks, value, workers",
    [
        *[(4, "", 1, "auto", 4), (96, "", 8, "auto", 8), (16, "", 4, "auto", 4), (2, "", 4, "0", 0)],
        *[(96, "50000 100000", 1, "auto", 1), (96, "1200000 100000", 4, "auto", 3), (96, "max 100000", 1, "auto", 8)],
    ],
)
def test_each_rank_reads_on_its_share_of_the_cores(monkeypatch, tmp_path, cores, limit, local_ranks, value, workers):
    """`limit`: of a container, whose processes may run on all cores of the machine."""
    monkeypatch.setattr(distributed.os, "sched_getaffinity", lambda pid: range(cores), raising=False)
    monkeypatch.setattr(distributed, "CPU_LIMIT", tmp_path / "cpu.max")
    if limit:
        (tmp_path / "cpu.max").write_text(limit + "\n")
    monkeypatch.setattr(distributed, "launcher", lambda: "torchrun" if local_ranks > 1 else "")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local_ranks))
    config = run_config(f"data.workers={value}").data
    assert data.workers_of(config) == workers
    assert data.loader([0], config, World()).num_workers == workers


def test_data_workers_are_automatic_unless_a_number_is_given():
    assert run_config().data.workers == run_config("data.workers=auto").data.workers == "auto"
    assert run_config("experiment=camvid/resnext_small", "data.root=DIR").data.workers == 1
    for value in ("many", "1.5", "null", "true", "-1"):
        with pytest.raises(ValueError, match=r"data.workers=.*: expected auto, or .*0 or more, at most 1024"):
            run_config(f"data.workers={value}")
