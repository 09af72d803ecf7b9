"""Time that a step waits for data."""

import time
from collections.abc import Iterable, Iterator


class DataWait:
    """Iterates over minibatches. `seconds`: how long the last one took to arrive."""

    def __init__(self, minibatches: Iterable[dict]):
        self.minibatches = minibatches
        self.seconds = 0.0

    def __iter__(self) -> Iterator[dict]:
        minibatches = iter(self.minibatches)
        while True:
            started = time.perf_counter()
            minibatch = next(minibatches, None)
            self.seconds = time.perf_counter() - started
            if minibatch is None:
                return
            yield minibatch
