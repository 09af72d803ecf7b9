"""What a run goes on with: random numbers of every process, scaler, averaged weights."""

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from engine import checkpoint
from engine.distributed import World
from engine.learner import Learner
from engine.run_state import restore_run, run_state


def small_learner(precision: str = "float32", averaged: bool = False) -> Learner:
    """After two steps."""
    network = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=10)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=precision == "float16")
    average = AveragedModel(network, multi_avg_fn=get_ema_multi_avg_fn(0.9)) if averaged else None
    learner = Learner(network, network, optimizer, scheduler, scaler, average)
    for _ in range(2):
        learner.backward(network(torch.randn(3, 2)).square().mean())
        learner.gradient_norm()
        learner.step()
    return learner


@pytest.fixture
def stored(tmp_path, monkeypatch):
    """The state of three processes with streams of their own, written and read, and the next numbers of each."""
    learner, states, following = small_learner(), [], []
    for rank in range(3):
        torch.manual_seed(rank)
        states.append((torch.get_rng_state(), None))
        following.append(torch.rand(3))
    with monkeypatch.context() as patch:
        patch.setattr(World, "gather", lambda world, own: states)
        state = run_state(learner, 7, World(size=3))
    checkpoint.save(tmp_path / "last.pt", state)
    return checkpoint.read(tmp_path / "last.pt"), following


def restored(state: dict, rank: int = 0, world_size: int = 1) -> torch.Tensor:
    """The next random numbers of a process."""
    learner = small_learner()
    torch.manual_seed(123)
    assert restore_run(state, learner, World(rank, world_size)) == 7
    return torch.rand(3)


def test_the_random_stream_continues(tmp_path):
    checkpoint.save(tmp_path / "last.pt", run_state(small_learner(), 7, World()))
    expected = torch.rand(3)
    assert torch.equal(restored(checkpoint.read(tmp_path / "last.pt")), expected)


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
        "other numbers than it would have there, and norms that are not synchronised see 1.5 times as many crops"
    ]
    assert torch.equal(restored(state, rank=1, world_size=2), ranks[1])  # again the same
    streams = [*following, *ranks, restored(state, rank=0, world_size=1)]
    assert len({tuple(stream.tolist()) for stream in streams[:5]}) == 5
    assert torch.equal(streams[5], ranks[0])


def test_a_checkpoint_from_before_there_were_ranks_continues(stored, caplog):
    state, following = stored
    state["random"]["cpu"] = state["random"]["cpu"][1]
    assert torch.equal(restored(state), following[1]) and not caplog.records


def test_scaler_and_averaged_weights_continue(tmp_path):
    assert not {"scaler", "ema"} & run_state(small_learner(), 2, World()).keys()
    learner = small_learner("float16", averaged=True)
    learner.scaler.update(32.0)
    state = run_state(learner, 2, World())
    assert state["ema"].keys() == state["network"].keys()
    checkpoint.save(tmp_path / "last.pt", state)

    again = small_learner("float16", averaged=True)
    restore_run(checkpoint.read(tmp_path / "last.pt"), again, World())
    assert again.scaler.get_scale() == 32.0
    for before, after in ((learner.network, again.network), (learner.average, again.average)):
        assert all(torch.equal(a, b) for a, b in zip(before.parameters(), after.parameters(), strict=True))
    for one in (learner, again):
        with torch.no_grad():
            [parameter.add_(1) for parameter in one.network.parameters()]
        one.average.update_parameters(one.network)
    assert torch.equal(learner.average.module.weight, again.average.module.weight)
    assert not torch.equal(learner.average.module.weight, learner.network.weight)
