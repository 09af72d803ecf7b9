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

    Workers read ahead of the step. So each minibatch waits in `noted` until a step takes it, together with the state
    that the sampler had after it. ValueError: a minibatch is no list of draws.
    """

    def __init__(self, sampler: Any, name: str, order: Mapping[str, Any], steps_per_epoch: int):
        self.sampler, self.name, self.order, self.steps_per_epoch = sampler, name, order, steps_per_epoch
        self.noted = deque[tuple[list, Any]]()

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[list[Draw]]:
        self.noted.clear()
        crops, rank, ranks = (self.order[name] for name in ("crops_per_minibatch", "rank", "world_size"))
        for step, minibatch in enumerate(self.sampler, start=self.order["start_step"] + 1):
            try:
                draws = [Draw(*key) for key in minibatch]
            except TypeError as error:
                expected = "expected a list of (epoch, number) or datasets.Draw"
                raise ValueError(f"{self.name} gives {minibatch!r}: {expected}") from error
            self.noted.append((draws, state_of(self.sampler)))
            epoch, first = step / self.steps_per_epoch, (step - 1) * crops + rank * crops // ranks
            yield [draw._replace(moment=Moment(step, epoch, place)) for place, draw in enumerate(draws, start=first)]
