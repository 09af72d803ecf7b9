"""Asking a run to stop: schedulers send SIGTERM or SIGUSR1 some time before they take the machine away."""

import signal
import threading
from collections.abc import Iterator, Sized

import torch

from engine.distributed import World, launched

EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: try again later
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Preempted(Exception):
    """The run was asked to stop, and has kept a checkpoint to continue from."""


class StopRequest:
    """While this context is open, a signal sets `requested` instead of killing the process."""

    def __init__(self):
        self.requested = False
        self.before: dict = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():  # Python lets no other thread install handlers
            self.before = {number: signal.signal(number, self._request) for number in SIGNALS}
        return self

    def __exit__(self, kind: type | None, *_) -> None:
        if kind is not None and launched():
            return  # the process ends and is about to say why: torchrun's SIGTERM for another's end must not be faster
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _request(self, number: int, frame) -> None:
        self.requested = True


class UntilStopped:
    """Items, which end with `Preempted` when any process is asked to stop.

    All processes take as many turns, also those that have fewer items: none is left waiting for another.
    """

    def __init__(self, items: Sized, stop: StopRequest, world: World):
        self.items, self.stop, self.world = items, stop, world

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator:
        items = iter(self.items)
        for turn in range(max(self.world.gather(len(self.items)))):
            if self.world.sum_(torch.tensor(int(self.stop.requested))).item():
                raise Preempted("stopped during an evaluation, which will be made again")
            if turn < len(self.items):
                yield next(items)
