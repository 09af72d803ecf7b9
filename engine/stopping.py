"""Stop a run on request: job schedulers send SIGTERM or SIGUSR1 before they take the machine away."""

import os
import signal
import threading
import time
from collections.abc import Iterator

import torch

from engine.dataset import SizedIterable
from engine.distributed import World, launched

EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: try again later
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
ONE_REQUEST_SECONDS = 5.0


class Preempted(Exception):
    """The run stopped on request and can be resumed."""


class StopRequest:
    """Context in which a signal sets `requested` instead of killing the process.

    The same signal again ends the process, after `ONE_REQUEST_SECONDS`: Slurm and torchrun may both pass a signal on.
    """

    def __init__(self) -> None:
        self.requested = False
        self.requested_s: dict[int, float] = {}  # when each signal first came
        self.before: dict = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():  # no other thread may install handlers
            self.before = {number: signal.signal(number, self._request) for number in SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and launched():
            return  # after an error, torchrun's SIGTERM must not kill the process before its message is printed
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def anywhere(self, world: World) -> bool:
        """Whether any rank was asked to stop. Every rank must call it."""
        return bool(world.sum_(torch.tensor(int(self.requested))))

    def _request(self, number: int, frame: object) -> None:
        if time.monotonic() > self.requested_s.setdefault(number, time.monotonic()) + ONE_REQUEST_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.requested = True


class UntilStopped:
    """Yields minibatches until any rank is asked to stop, then raises `Preempted`.

    Ranks with fewer minibatches check as often as the others, so none waits for another.
    """

    def __init__(self, items: SizedIterable[dict], stop: StopRequest, world: World):
        self.items, self.stop, self.world = items, stop, world

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[dict]:
        items = iter(self.items)
        for turn in range(max(self.world.gather(len(self.items)))):
            if self.stop.anywhere(self.world):
                raise Preempted("stopped during an evaluation, which will be repeated")
            if turn < len(self.items):
                yield next(items)
