"""Stopping a run on request: schedulers send SIGTERM or SIGUSR1 some time before they take the machine away."""

import signal
import threading
from collections.abc import Iterator, Sized

import torch

from engine.distributed import World, launched

EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: try again later
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Preempted(Exception):
    """The run stopped on request and can be continued."""


class StopRequest:
    """Context in which a signal sets `requested` instead of killing the process."""

    def __init__(self):
        self.requested = False
        self.before: dict = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():  # Python lets no other thread install handlers
            self.before = {number: signal.signal(number, self._request) for number in SIGNALS}
        return self

    def __exit__(self, kind: type | None, *_) -> None:
        if kind is not None and launched():
            return  # an error ends the process; torchrun's SIGTERM must not kill it before its message is printed
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def anywhere(self, world: World) -> bool:
        """Whether any process was asked to stop; every process calls it."""
        return bool(world.sum_(torch.tensor(int(self.requested))))

    def _request(self, number: int, frame) -> None:
        self.requested = True


class UntilStopped:
    """Yields items until any process is asked to stop, then raises `Preempted`.

    Processes with fewer items take as many turns as the others, so that none waits for another.
    """

    def __init__(self, items: Sized, stop: StopRequest, world: World):
        self.items, self.stop, self.world = items, stop, world

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator:
        items = iter(self.items)
        for turn in range(max(self.world.gather(len(self.items)))):
            if self.stop.anywhere(self.world):
                raise Preempted("stopped during an evaluation, which will be made again")
            if turn < len(self.items):
                yield next(items)
