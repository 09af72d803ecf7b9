"""The training minibatches of a run in order: the steps that take them, and what their sampler kept after each."""

from collections import deque
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

from torch.utils.data import Sampler

from datasets.augmentations import Moment
from datasets.items import Draw


def state_of(part: Any) -> Any:
    """A copy of a part's state; None unless it has `state_dict` and `load_state_dict`."""
    return deepcopy(part.state_dict()) if hasattr(part, "state_dict") and hasattr(part, "load_state_dict") else None


class Draws(Sampler):
    """The minibatches of a `sampler`. `order`: the arguments of all samplers.

    Workers read ahead of the step. So each minibatch waits in `ahead` until a step takes it, with the state that the
    sampler had after it, which is the state of the run. ValueError: a minibatch is no list of draws.
    """

    def __init__(self, sampler: Any, name: str, order: Mapping[str, Any], steps_per_epoch: int):
        self.sampler = sampler
        self.name = name
        self.order = order
        self.steps_per_epoch = steps_per_epoch
        self.ahead = deque[tuple[list[Draw], Any]]()
        self.state = state_of(sampler)

    def __len__(self) -> int:
        return len(self.sampler)

    def take(self) -> list[Draw]:
        """The draws of the next step."""
        draws, self.state = self.ahead.popleft()
        return draws

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.sampler.load_state_dict(state)
        self.state = state

    def __iter__(self) -> Iterator[list[Draw]]:
        self.ahead.clear()
        crops, rank, ranks = (self.order[name] for name in ("crops_per_minibatch", "rank", "world_size"))
        for step, minibatch in enumerate(self.sampler, start=self.order["start_step"] + 1):
            try:
                draws = [Draw(*key) for key in minibatch]
            except TypeError as error:
                expected = "expected a list of (epoch, number) or datasets.Draw"
                raise ValueError(f"{self.name} gives {minibatch!r}: {expected}") from error
            self.ahead.append((draws, state_of(self.sampler)))
            epoch = step / self.steps_per_epoch
            first = (step - 1) * crops + rank * crops // ranks
            yield [draw._replace(moment=Moment(step, epoch, place)) for place, draw in enumerate(draws, start=first)]
