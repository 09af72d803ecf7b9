"""Trace training steps: the time of each operator, by thread and stream."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch.profiler import profile, schedule

from engine.process.console import logger

WARM_UP_STEPS = 10


def profiled(minibatches: Iterable[dict], steps: int, folder: Path) -> Iterator[dict]:
    """Yield the minibatches and profile `steps` of them, after ten warm-up steps.

    Writes folder/trace.json, for Perfetto or chrome://tracing, and folder/operators.txt, a summary by operator.
    """

    def write(finished: profile) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        finished.export_chrome_trace(str(folder / "trace.json"))
        order = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        (folder / "operators.txt").write_text(finished.key_averages().table(sort_by=order, row_limit=40))
        logger.info(f"profiled: {folder / 'trace.json'}, {folder / 'operators.txt'}")

    rhythm = schedule(wait=WARM_UP_STEPS - 2, warmup=2, active=steps, repeat=1)
    with profile(schedule=rhythm, on_trace_ready=write, acc_events=True) as profiler:
        for minibatch in minibatches:
            yield minibatch
            profiler.step()
