"""Train in two processes, connected by gloo on one CUDA device, or by nccl on two:

    python -m scripts.evidence.ranks device=cuda out=FILE.json
    python -m scripts.evidence.ranks device=cuda only=[gloo] out=FILE.json
    python -m scripts.evidence.ranks small=true out=FILE.json

Measures deviations of gradients, relative to the largest: a synchronised norm on half of the batch against one process
with all of it, and recomputed networks against plain ones in the same group. With gloo both processes share a device.
"""

import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from engine.process.distributed import data_parallel
from keepless import InPlaceABN, recompute_activations
from scripts.evidence.methods import PLAIN, RECOMPUTED, deviation, mean_squares
from scripts.evidence.zoo import DECODER, made
from scripts.reports import frame
from scripts.reports.markdown import Rows
from scripts.reports.measuring import Elsewhere

SIZE = 2
BUDGET = "budget 0.5"
SYNC = "synchronised norm"
WRAPPED = {"ddp": "resnet50", "fsdp2": DECODER}  # how a network is shared: which network


@dataclass
class RanksArguments(frame.DeviceArguments):
    small: bool = False  # small networks


def items(arguments: RanksArguments) -> dict[str, tuple[str, str]]:
    two = arguments.device == "cuda" and torch.cuda.device_count() >= SIZE
    backends = ["gloo", *(["nccl"] if two else [])]
    return {f"{backend}/{what}": (backend, what) for backend in backends for what in (SYNC, *WRAPPED)}


def measure(arguments: RanksArguments, backend: str, what: str) -> Rows:
    """Rows of the first process: {"backend", "what", "method", "deviation"}, or "reason"."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        store = str(Path(folder) / "store")
        ranks = [stack.enter_context(Elsewhere(Rank, rank, store, backend, arguments)) for rank in range(SIZE)]
        with ThreadPoolExecutor(SIZE) as calls:
            found = list(calls.map(lambda rank: rank.call("measure", what), ranks))
    return [{"backend": backend, "what": what, **row} for row in found[0]]


class Rank:
    """One of the processes."""

    def __init__(self, rank: int, store: str, backend: str, arguments: RanksArguments):
        torch.set_num_threads(1)
        self.rank, self.arguments, self.device = rank, arguments, arguments.device
        if self.device == "cuda":
            torch.cuda.set_device(rank if backend == "nccl" else 0)
        limit = timedelta(minutes=2)
        dist.init_process_group(backend, store=dist.FileStore(store, SIZE), rank=rank, world_size=SIZE, timeout=limit)

    def measure(self, what: str) -> Rows:
        rows = [self.synchronised()] if what == SYNC else list(self.trainings(what))
        dist.barrier()
        return rows

    def synchronised(self) -> dict:
        """A synchronised norm on half of a batch against one process with the whole batch, in float32."""
        torch.manual_seed(0)
        x, dz = torch.randn(2, 8, 32, 16, 16, device=self.device).unbind()
        found = []
        for sync, part in ((False, slice(None)), (True, slice(4 * self.rank, 4 * self.rank + 4))):
            layer = InPlaceABN(32, sync=sync).to(self.device)
            own = x[part].clone().requires_grad_()
            z = layer(own)
            found.append(torch.stack([z.detach(), *torch.autograd.grad(z, own, dz[part])]))
        whole, half = found
        return {"method": "in-place II", "deviation": deviation(half, whole[:, part])}

    def trainings(self, what: str) -> Iterator[dict]:
        """Three steps with each method, and how far gradients deviate from the plain network's."""
        reference: Tensor | None = None
        for method, prepare in METHODS.items():
            try:
                gradients = self.gradients(what, prepare)
            except Exception as error:  # e.g. a collective that gloo lacks on this device
                yield {"method": method, "reason": frame.reason(error)}
                if method == PLAIN:
                    return
                continue
            reference = gradients if reference is None else reference
            yield {"method": method, "deviation": deviation(gradients, reference)}

    def gradients(self, what: str, prepare: Callable[[nn.Module], Any]) -> Tensor:
        """The gradients of the third step."""
        name = "squeezenet1_1" if self.arguments.small and what == "ddp" else WRAPPED[what]
        network, inputs = made(name, self.device, 8, 64 if self.arguments.small else 224)
        if what == "ddp":
            prepare(network)
            trained: nn.Module = data_parallel(network, torch.device(self.device))
        else:
            mesh = init_device_mesh(self.device, (SIZE,))
            for block in network.blocks:  # type: ignore[union-attr]  # a decoder
                fully_shard(block, mesh=mesh)
            trained = cast(nn.Module, fully_shard(network, mesh=mesh))
            prepare(trained)

        for _ in range(3):
            trained.zero_grad()
            mean_squares(trained(inputs)).backward()
        own = [p.grad for p in network.parameters() if p.grad is not None]
        return torch.cat([(g.to_local() if isinstance(g, DTensor) else g).flatten() for g in own])


METHODS: dict[str, Callable[[nn.Module], Any]] = {
    PLAIN: lambda network: network,
    RECOMPUTED: recompute_activations,
    BUDGET: lambda network: recompute_activations(network, budget=0.5),
}


def about(arguments: dict) -> tuple[str, str]:
    return f"Two processes, on {frame.DEVICES[arguments['device']]}", "Gradients of the third step"


BENCHMARK = frame.Benchmark("ranks", RanksArguments, items, measure, about)
run, main = frame.command(BENCHMARK, __doc__)

if __name__ == "__main__":
    main()
