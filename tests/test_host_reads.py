"""The counter of host reads finds what makes the host wait, and nothing else."""

from threading import Event, Thread

import numpy as np
import pytest
import torch

from tests.host_reads import host_reads

READS = {
    "item": lambda x: x[0].item(),
    "truth": lambda x: bool(x[0] > 0),
    "int": lambda x: int(x[0]),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "to the cpu": lambda x: x.to("cpu"),
    "numpy": lambda x: x.numpy(),
    "array": lambda x: np.asarray(x),
    "mask": lambda x: x[x > 1],
    "writes by a mask": lambda x: x.index_put_((x > 1,), torch.arange(2.0)),
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 1),
    "where with a number": lambda x: torch.where(x > 1, x, 0),
    "tensor on the device": lambda x: torch.tensor([1], device=x.device),
    "masked_select": lambda x: x.masked_select(x > 1),
    "bincount": lambda x: torch.bincount(x.long()),
    "unique": lambda x: x.unique(),
    "equal": lambda x: torch.equal(x, x + 1),
    "format": lambda x: f"{x[1]:.2f}",
    "a view of a flag": lambda x: torch.tensor([1, 2])[0].item(),
}
NO_READS = {
    "arithmetic": lambda x: (x + 1).sum(),
    "fills a mask": lambda x: x.masked_fill_(x > 1, 0),
    "writes one value by a mask": lambda x: x.__setitem__(x > 1, 0.0),
    "where with values": lambda x: torch.where(x > 1, x, x + 1),
    "index": lambda x: x[torch.arange(2)],
    "index_add_": lambda x: x.index_add_(0, torch.arange(2), torch.ones(2)),
    "to another dtype": lambda x: x.to(torch.float64),
    "to the device": lambda x: x.to(torch.device("cpu")),
    "asynchronous copy": lambda x: x.to("cpu", non_blocking=True),
    "a flag of the host": lambda x: bool(torch.tensor(1).add_(1)),
    "flags of the host": lambda x: torch.tensor([1, 2]).tolist(),
}


@pytest.mark.parametrize("inference", [False, True])
def test_a_read_is_counted_once_with_its_line_and_other_operations_are_not(inference):
    for name, operation in (READS | NO_READS).items():
        with torch.inference_mode(inference), host_reads() as reads:
            operation(torch.arange(4.0))
        assert len(reads) == (name in READS), (name, reads)
        assert all(read.startswith("tests/test_host_reads.py:") and " <lambda>: " in read for read in reads), name


def test_a_read_counts_while_another_thread_reads(monkeypatch):
    """Such as one that writes files, whose own reads do not count."""
    begun, counted = Event(), Event()
    monkeypatch.setattr(torch.Tensor, "tolist", lambda x: (begun.set(), counted.wait(60)))
    with host_reads() as reads:
        (thread := Thread(target=torch.arange(4.0).tolist)).start()
        begun.wait(60)
        torch.arange(4.0).cpu()
        counted.set()
        thread.join()
    assert len(reads) == 1
