"""The random numbers with which a run resumes, on every rank."""

import pytest
import torch

from engine import checkpoint
from engine.distributed import World
from engine.random_states import random_states, restore_random_states


@pytest.fixture
def stored(tmp_path, monkeypatch):
    """The state of three ranks with different streams, written and read back, and each one's next numbers."""
    states, following = [], []
    for rank in range(3):
        torch.manual_seed(rank)
        states.append((torch.get_rng_state(), None))
        following.append(torch.rand(3))
    with monkeypatch.context() as patch:
        patch.setattr(World, "gather", lambda world, own: states)
        state = random_states(World(size=3))
    checkpoint.save(tmp_path / "last.pt", {"random": state})
    return checkpoint.read(tmp_path / "last.pt")["random"], following


def restored(state: dict, rank: int = 0, world_size: int = 1) -> torch.Tensor:
    """This process's next random numbers."""
    torch.manual_seed(123)
    restore_random_states(state, World(rank, world_size))
    return torch.rand(3)


def test_the_random_stream_continues(tmp_path):
    checkpoint.save(tmp_path / "last.pt", {"random": random_states(World())})
    expected = torch.rand(3)
    assert torch.equal(restored(checkpoint.read(tmp_path / "last.pt")["random"]), expected)


def test_every_rank_continues_its_own_random_stream(stored, caplog):
    state, following = stored
    for rank in range(3):
        assert torch.equal(restored(state, rank=rank, world_size=3), following[rank])
    assert not caplog.records


def test_another_number_of_ranks_has_new_random_streams_and_says_so(stored, caplog):
    state, following = stored
    ranks = [restored(state, rank=rank, world_size=2) for rank in range(2)]
    assert [record.getMessage() for record in caplog.records] == [
        "the run was on 3 x cpu and continues on 2 x cpu: at the same step with the same samples, but dropout draws "
        "other numbers, and unsynchronised norms see 1.5 times as many crops"
    ]
    assert torch.equal(restored(state, rank=1, world_size=2), ranks[1])  # reproducibly
    streams = [*following, *ranks, restored(state, rank=0, world_size=1)]
    assert len({tuple(stream.tolist()) for stream in streams[:5]}) == 5
    assert torch.equal(streams[5], ranks[0])
