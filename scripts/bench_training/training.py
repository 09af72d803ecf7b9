"""A training as train_seg.py does it, one step at a time, on minibatches in memory."""

import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch._dynamo.utils import counters

from datasets import synthetic
from engine import build, command_line, loop
from engine import config as configuration
from engine.distributed import World, device_of
from engine.malloc import keep_freed_memory
from engine.peak_memory import peak_memory_mib
from engine.profiling import WARM_UP_STEPS, profiled
from engine.schema.segmentation import SegmentationRun
from scripts.memory_measurement import peak_bytes, saved_for_backward

from .switches import LONG, Switch

MINIBATCHES = 4  # different ones, which come again


class Training:
    """
    Args:
        common: overrides of train_seg.py that hold for every switch.
        switch: what is different here.
        threads: of PyTorch on the CPU.
    """

    def __init__(self, common: tuple[str, ...], switch: Switch, threads: int):
        torch.set_num_threads(threads)
        self.config = composed(*common, *switch.overrides)
        trainer = self.config.trainer
        build.arithmetic(trainer)
        self.world = World(device=device_of(trainer.device))
        if self.world.device.type == "cpu" and switch.freed_memory_kept:
            keep_freed_memory()
        dataset = synthetic(None, "train")
        make = partial(build.segmentation_network, self.config, len(dataset.classes))
        self.learner = build.learner(self.config, make, LONG, self.world)
        self.loss = build.loss(self.config.loss, dataset.ignore_index)
        self.in_memory = list(build.training_loader(self.config, dataset, MINIBATCHES, self.world))
        self.prefetched = switch.prefetched
        self.minibatches = self.endless()
        if trainer.profile:
            self.folder = tempfile.TemporaryDirectory()
            self.minibatches = profiled(self.minibatches, trainer.profile, Path(self.folder.name))
        self.losses: list[float] = []
        counters.clear()  # of the graph that looked for a compiler

    def endless(self) -> Iterator[dict]:
        """Minibatches for ever, as the loop gets them."""
        minibatches = itertools.cycle(self.in_memory)
        return loop.prefetched(minibatches, self.world.device) if self.prefetched else minibatches

    def step(self) -> float:
        """Milliseconds of one more step."""
        started_s = time.perf_counter()
        minibatch = next(self.minibatches)
        whole = self.config.data.crops_per_minibatch
        loss, _ = loop.train_step(self.learner, self.loss, minibatch, whole, self.world)
        self._finish()
        self.losses.append(loss)
        return round(1e3 * (time.perf_counter() - started_s), 3)

    def warm_up(self, steps: int) -> dict:
        """Seconds of the first step, and the graphs that torch.compile has made after all of them."""
        first_step_s = round(self.step() / 1e3, 2)
        for _ in range(max(steps, WARM_UP_STEPS if self.config.trainer.profile else 0) - 1):
            self.step()
        return {"first_step_s": first_step_s, "graphs_warm": counters["stats"]["unique_graphs"]}

    def facts(self) -> dict:
        """Everything but times: memory, graphs, and the mean loss of all minibatches after the first step."""
        process_mib = round(peak_memory_mib(torch.device("cpu")), 1)
        graphs, breaks = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
        self.minibatches = self.endless()  # a trace ends: a process has one profiler at a time
        losses = self.losses[1 : 1 + MINIBATCHES]
        return {
            "saved_bytes": self.saved_bytes(),
            "peak_bytes": peak_bytes(self.step, self.world.device.type),
            "process_mib": process_mib,
            "graphs": graphs,
            "graph_breaks": breaks,
            "loss": round(statistics.mean(losses), 5),
        }

    def saved_bytes(self) -> int:
        """Bytes that autograd keeps of the first part of a minibatch for its backward pass, parameters aside."""
        minibatch = next(self.minibatches)
        parts = self.config.trainer.accumulation_steps
        images, labels = (minibatch[key].tensor_split(parts)[0] for key in ("image", "label"))
        self.learner.network.train()
        logits, saved = saved_for_backward(lambda: self.learner.forward(images))
        _, saved_by_loss = saved_for_backward(lambda: self.loss(logits, labels.to(logits.device)))
        held = {parameter.untyped_storage()._cdata for parameter in self.learner.network.parameters()}
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in saved + saved_by_loss}
        return sum(storage.nbytes() for address, storage in storages.items() if address not in held)

    def _finish(self) -> None:
        if self.world.device.type == "cuda":
            torch.cuda.synchronize()


def composed(*overrides: str) -> SegmentationRun:
    """The checked configuration of `train_seg.py OVERRIDES`."""
    command_line.declare("train_seg", SegmentationRun)
    return configuration.typed(command_line.composed("train_seg", *overrides))
