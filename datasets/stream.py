"""The training minibatches of a run in order: the steps that take them, and what their sampler kept after each."""

from collections import deque
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

from torch.utils.data import Sampler

from datasets.augmentations import Moment
from datasets.items import Draw
from datasets.samplers import minibatches_per_epoch


def state_of(part: Any) -> Any:
    """A copy of a part's state; None unless it has `state_dict` and `load_state_dict`."""
    return deepcopy(part.state_dict()) if hasattr(part, "state_dict") and hasattr(part, "load_state_dict") else None


class Draws(Sampler):
    """The minibatches that a `sampler` draws from so many `images`. `order`: the arguments of all samplers.

    Workers read ahead of the step. So each minibatch waits in `ahead` until a step takes it, with the state that the
    sampler had after it, which is the state of the run.

    ValueError: a minibatch is no list of draws of these images, or the sampler ends before the run.
    """

    def __init__(self, sampler: Any, name: str, order: Mapping[str, Any], images: int):
        self.sampler = sampler
        self.name = name
        self.order = order
        self.images = images
        self.steps_per_epoch = minibatches_per_epoch(images, order["crops_per_minibatch"])
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
        """The minibatches, each put into `ahead` before it is given; what waits there from an earlier pass is gone."""
        self.ahead.clear()
        crops, rank, ranks = (self.order[name] for name in ("crops_per_minibatch", "rank", "world_size"))
        step, steps = self.order["start_step"], self.order["steps"]
        steps_to_take = range(step + 1, steps + 1)  # no minibatch after the last is drawn
        for step, minibatch in zip(steps_to_take, self.sampler, strict=False):
            try:
                draws = [Draw(*key) for key in minibatch]
            except TypeError as error:
                expected = "expected a list of (epoch, number) or datasets.Draw"
                raise ValueError(f"{self.name} gives {minibatch!r}: {expected}") from error
            absent_images = [draw.image for draw in draws if not 0 <= draw.image < self.images]
            if absent_images:
                raise ValueError(f"{self.name} draws image {absent_images[0]}: expected 0 to {self.images - 1}")
            self.ahead.append((draws, state_of(self.sampler)))
            epoch = step / self.steps_per_epoch
            first = (step - 1) * crops + rank * crops // ranks
            yield [draw._replace(moment=Moment(step, epoch, place)) for place, draw in enumerate(draws, start=first)]
        if step < steps:
            raise ValueError(f"{self.name} ended after {step} of {steps} minibatches")
