"""One pass over a data set by all cores.

Processes, not threads: one that is started while a thread that has used OpenCV ends may find a mutex of OpenCV locked
for ever, and a training starts its workers right after such a pass.
"""

import os
from collections.abc import Sequence

import torch
from torch.utils.data import DataLoader, Dataset

from datasets.loading import Workers, worker_init


def in_order(source: Dataset, indices: Sequence[int], workers: int | None = None) -> DataLoader:
    """`source[index]` for each of `indices`, as it is, in order; read by `workers` processes.

    By default there is one per core; 0 is none but this one.
    """
    count = min(_cores() if workers is None else workers, len(indices))
    return DataLoader(
        source,
        sampler=indices,
        batch_size=None,
        collate_fn=_as_it_is,
        num_workers=count,
        worker_init_fn=worker_init,
        multiprocessing_context=Workers() if count else None,
        # Its own generator: an iterator draws a number when it starts, and a run must not depend on what is cached.
        generator=torch.Generator(),
    )


def _cores() -> int:
    """Cores that this process may use, as a scheduler may not give it all."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _as_it_is(item):
    return item
