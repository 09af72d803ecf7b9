"""Which images each training step sees. A run is one stream of steps, so that resuming is starting later in it."""

from collections.abc import Iterator

import numpy as np
from torch.utils.data import Sampler


def minibatches_per_epoch(images: int, crops_per_minibatch: int) -> int:
    """Full minibatches in one pass over `images`. ValueError where there is none."""
    if crops_per_minibatch < 1:
        raise ValueError(f"data.crops_per_minibatch={crops_per_minibatch} must be at least 1")
    if images < crops_per_minibatch:
        raise ValueError(
            f"data.crops_per_minibatch={crops_per_minibatch} is more than the {images} images of the training "
            f"split, so that no minibatch is full; set data.crops_per_minibatch to at most {images}"
        )
    return images // crops_per_minibatch


class ShuffledMinibatches(Sampler):
    """The paper's uniform sampling: every epoch shuffles all images and deals them out in minibatches.

    Iterating yields, for each step `start_step … steps - 1` of the run, a list of `crops_per_minibatch` keys
    (epoch, index). The order within an epoch depends on (seed, epoch) only; images that do not fill a last minibatch
    are left out of that epoch. Meant as the `batch_sampler` of a DataLoader over `TrainingCrops`.
    """

    def __init__(self, images: int, crops_per_minibatch: int, seed: int, steps: int, start_step: int = 0):
        self.steps_per_epoch = minibatches_per_epoch(images, crops_per_minibatch)
        assert 0 <= start_step, f"a run has no step {start_step}"
        self.images = images
        self.crops_per_minibatch = crops_per_minibatch
        self.seed = seed
        self.steps = steps
        self.start_step = start_step

    def __len__(self) -> int:
        return max(0, self.steps - self.start_step)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        order, order_epoch = None, None
        for step in range(self.start_step, self.steps):
            epoch, position = divmod(step, self.steps_per_epoch)
            if epoch != order_epoch:
                order, order_epoch = self.order(epoch), epoch
            first = position * self.crops_per_minibatch
            yield [(epoch, index) for index in order[first : first + self.crops_per_minibatch]]

    def order(self, epoch: int) -> list[int]:
        """The permutation of all images in an epoch."""
        # The spawn key keeps this stream apart from those of the crops, which are seeded by (seed, epoch, index):
        # numpy takes (seed, epoch) and (seed, epoch, 0) for the same seed.
        entropy = np.random.SeedSequence([self.seed, epoch], spawn_key=(0,))
        return np.random.default_rng(entropy).permutation(self.images).tolist()
