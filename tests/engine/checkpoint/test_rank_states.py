"""The random numbers with which a run resumes, on every rank."""

from collections import OrderedDict, deque
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from engine.checkpoint import files as checkpoint
from engine.checkpoint.rank_states import check_savable, random_states, restore_random_states
from engine.process.distributed import World


def restored(state: dict, rank: int = 0, world_size: int = 1) -> torch.Tensor:
    """This process's next random numbers."""
    torch.manual_seed(123)
    restore_random_states(state, World(rank, world_size))
    return torch.rand(3)


def test_every_rank_continues_its_own_random_stream_and_other_ranks_get_new_ones(tmp_path, monkeypatch, caplog):
    states, following = [], []
    for rank in range(3):
        torch.manual_seed(rank)
        states.append((torch.get_rng_state(), None))
        following.append(torch.rand(3))
    with monkeypatch.context() as patch:
        patch.setattr(World, "gather", lambda world, state: states)
        checkpoint.save(tmp_path / "last.pt", {"random": random_states(World(size=3))})
    state = checkpoint.read(tmp_path / "last.pt")["random"]
    for rank in range(3):
        assert torch.equal(restored(state, rank=rank, world_size=3), following[rank])
    alone = random_states(World())
    assert torch.equal(torch.rand(3), restored(alone)) and not caplog.records

    ranks = [restored(state, rank=rank, world_size=2) for rank in range(2)]
    assert [record.getMessage() for record in caplog.records] == [
        "the run was on 3 x cpu and continues on 2 x cpu: at the same step with the same samples, but dropout draws "
        "other numbers, and unsynchronised norms see 1.5 times as many crops"
    ]
    assert torch.equal(restored(state, rank=1, world_size=2), ranks[1])  # reproducibly
    streams = [*following, *ranks, restored(state, rank=0, world_size=1)]
    assert len({tuple(stream.tolist()) for stream in streams[:5]}) == 5
    assert torch.equal(streams[5], ranks[0])


def test_a_device_s_stream_continues_on_its_rank(monkeypatch):
    monkeypatch.setattr(torch.cuda, "set_rng_state", restore := Mock())
    state = {"cpu": 2 * [torch.get_rng_state()], "cuda": ["first", "second"], "threads": 1}
    world = World(1, 2, torch.device("cuda", 1))
    restore_random_states(state, world)
    restore.assert_called_once_with("second", world.device)


def test_another_number_of_threads_is_warned_of(monkeypatch, caplog):
    """Sums are then added in another order; on CUDA devices the threads of the host do not matter."""
    state = random_states(World())
    assert state["threads"] == 1
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    restored(state)
    assert caplog.messages == [
        "the run was on 1 threads and continues on 3: it rounds otherwise; OMP_NUM_THREADS=1 keeps it bitwise identical"
    ]


def test_a_state_that_would_not_be_loaded_is_refused_by_name():
    """torch.save writes it without a word, and the checkpoint of a finished run could not be read."""
    state = {"state": {0: {"mean": torch.ones(2), "dtype": torch.float32}}, "param_groups": [OrderedDict(lr=0.1)]}
    check_savable("optim=own", state)
    for value in (np.ones(2), object(), deque([1.0])):
        with pytest.raises(ValueError, match="^optim=own has a state_dict of more than tensors, numbers, texts, lists"):
            check_savable("optim=own", {**state, "own": value})
