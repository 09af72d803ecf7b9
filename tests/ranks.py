"""A group of processes, connected by gloo, that run test functions together."""

import io
import multiprocessing
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.runs import hasten

# Processes are forked from one that has imported everything, which saves seconds in each of them.
FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(["tests.runs"])


class Ranks:
    """`world_size` processes, started once; `run` calls a function in all of them at once."""

    def __init__(self, world_size: int, folder: Path):
        self.connections, self.processes = [], []
        for rank in range(world_size):
            parent_end, child_end = FORKSERVER.Pipe()
            # Not a daemon, which could not start data workers; it ends when this process closes its end of the pipe.
            process = FORKSERVER.Process(target=_serve, args=(rank, world_size, str(folder / "store"), child_end))
            process.start()
            self.connections.append(parent_end)
            self.processes.append(process)

    def run(self, function: Callable, *args, timeout: float = 900.0) -> list:
        """Call function(rank, *args) in every process; return the results, or the exceptions raised.

        `function` is pickled by name, so it must stand at the top of a module. AssertionError: a process does not
        answer in time. Then all are killed, as the next test would get the late answers.
        """
        for connection in self.connections:
            connection.send((function, args))
        results = []
        for rank, connection in enumerate(self.connections):
            if not connection.poll(timeout):
                for process in self.processes:
                    process.kill()
                raised = [outcome for outcome in results if isinstance(outcome, Exception)]
                raise AssertionError(f"rank {rank} hangs") from next(iter(raised), None)
            results.append(torch.load(io.BytesIO(connection.recv_bytes()), weights_only=False))
        return results

    def stop(self) -> None:
        for connection in self.connections:
            with suppress(BrokenPipeError):  # of a process that was killed
                connection.send(None)
        for process in self.processes:
            process.join(10)
            process.kill()


def _serve(rank: int, world_size: int, store: str, connection) -> None:
    hasten(pytest.MonkeyPatch())
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size)
    while (task := connection.recv()) is not None:
        function, args = task
        try:
            result = function(rank, *args)
        except Exception as error:  # returned to the test
            error.add_note(traceback.format_exc()) if hasattr(error, "add_note") else None
            result = error
        content = io.BytesIO()
        torch.save(result, content)  # `send` would share the memory of every tensor, one after the other
        connection.send_bytes(content.getvalue())
    dist.destroy_process_group()
