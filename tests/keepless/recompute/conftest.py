"""Plans depend on the times of operators. In these tests they are counted, so a busy machine changes no plan."""

import pytest
import torch.distributed as dist

from keepless.recompute.step import counting, watch


@pytest.fixture(autouse=True)
def counted_times(monkeypatch):
    """20 us for a call, 10 GB/s, 80 Gflop/s; views take no time."""
    cost = counting._cost
    monkeypatch.setattr(counting, "_cost", lambda ran: cost(ran)._replace(seconds=seconds(ran)))
    monkeypatch.setattr(watch, "HOST_SECONDS", 1e-5)


@pytest.fixture
def one_process(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def seconds(ran: counting.RunOperator) -> float:
    return 2e-5 + ran.moved / 1e10 + ran.operations / 8e10 if ran.moved else 0.0
