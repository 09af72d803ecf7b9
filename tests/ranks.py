"""A group of processes that run functions of tests together, connected by gloo."""

import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


class Ranks:
    """`world_size` processes, started once: `run` calls a function in all of them at the same time."""

    def __init__(self, world_size: int, folder: Path):
        context = mp.get_context("spawn")
        self.connections, self.processes = [], []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            # Not a daemon, which could have no data workers of its own; it ends with this process's end of the pipe.
            process = context.Process(target=_serve, args=(rank, world_size, str(folder / "store"), theirs))
            process.start()
            self.connections.append(ours)
            self.processes.append(process)

    def run(self, function: Callable, *args, timeout: float = 180.0) -> list:
        """function(rank, *args) in every process: its results, or the exceptions it raised.

        `function` is found by its name, so it stands at the top of a module. A process that gives no answer in time
        raises AssertionError here: it hangs.
        """
        for connection in self.connections:
            connection.send((function, args))
        results = []
        for rank, connection in enumerate(self.connections):
            assert connection.poll(timeout), f"rank {rank} hangs"
            results.append(connection.recv())
        return results

    def stop(self) -> None:
        for connection in self.connections:
            connection.send(None)
        for process in self.processes:
            process.join(10)
            process.kill()


def _serve(rank: int, world_size: int, store: str, connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size)
    while (task := connection.recv()) is not None:
        function, args = task
        try:
            result = function(rank, *args)
        except Exception as error:  # the test judges it
            error.add_note(traceback.format_exc()) if hasattr(error, "add_note") else None
            result = error
        connection.send(result)
    dist.destroy_process_group()
