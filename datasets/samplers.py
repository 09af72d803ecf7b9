"""Samplers of training crops. A run is one stream of minibatches; resuming starts later in that stream."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from torch.utils.data import Sampler

from datasets.class_index import ClassIndex
from datasets.items import Draw


def minibatches_per_epoch(images: int, crops_per_minibatch: int) -> int:
    """Full minibatches in one pass over `images`; one if they do not fill it, and images then repeat."""
    return max(1, images // crops_per_minibatch)


@dataclass(eq=False)
class _Minibatches(Sampler):
    """Split every epoch's list of `images` keys into minibatches, and each minibatch among the ranks.

    If a minibatch does not divide equally, shares differ by one crop, in the same way in every minibatch.

    Iterating yields this rank's keys for each step `start_step … steps - 1` of the run. An epoch's list depends only on
    (seed, epoch); leftover keys that do not fill a minibatch are dropped. An epoch has as many draws as there are
    images, but at least a minibatch. Use it as the `batch_sampler` of a DataLoader over `TrainingCrops`.
    """

    images: int
    crops_per_minibatch: int
    seed: int
    steps: int
    start_step: int = 0
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        self.steps_per_epoch = minibatches_per_epoch(self.images, self.crops_per_minibatch)
        self.draws = max(self.images, self.crops_per_minibatch)  # in an epoch
        assert 0 <= self.start_step, f"a run has no step {self.start_step}"
        assert 0 <= self.rank < self.world_size, f"there is no rank {self.rank} among {self.world_size}"
        assert self.crops_per_minibatch >= self.world_size, "each rank needs a crop"

    def keys(self, epoch: int) -> Sequence[tuple]:
        """All keys of an epoch, the same on every rank."""
        raise NotImplementedError

    def __len__(self) -> int:
        return max(0, self.steps - self.start_step)

    def __iter__(self) -> Iterator[list[tuple]]:
        crops = self.crops_per_minibatch
        start, stop = (rank * crops // self.world_size for rank in (self.rank, self.rank + 1))  # in a minibatch
        keys: Sequence[tuple] = ()
        keys_epoch = None
        for step in range(self.start_step, self.steps):
            epoch, position = divmod(step, self.steps_per_epoch)
            if epoch != keys_epoch:
                keys = self.keys(epoch)
                keys_epoch = epoch
            yield list(keys[position * crops + start : position * crops + stop])


class ShuffledMinibatches(_Minibatches):
    """The paper's uniform sampling: every epoch shuffles all images. Keys are (epoch, index), or `Draw`."""

    def keys(self, epoch: int) -> list[tuple]:
        order = _rounds(np.arange(self.images), self.draws, _generator(self.seed, epoch, stream=0)).tolist()
        if self.draws > self.images:
            return [Draw(epoch, index, place) for place, index in enumerate(order)]
        return [(epoch, index) for index in order]


class ClassUniformMinibatches(_Minibatches):
    """The paper's class-uniform sampling (section 4.2): rare classes are sampled as often as frequent ones.

    The share `fraction` of an epoch's draws is class-uniform: draw a class, an image that contains it, a pixel of the
    class, then a crop that contains the pixel. The other draws are images without repetition, as in uniform sampling,
    at random positions in the list. Keys are `Draw`.

    Classes come in rounds: each round holds every class once, in random order. So the counts of any two classes differ
    by at most one, in the whole list and in any prefix, such as the part that fills minibatches. Likewise, a class uses
    all images that contain it before repeating one. Classes without pixels are left out. ValueError if no class has a
    pixel.
    """

    def __init__(
        self, index: ClassIndex, crops_per_minibatch: int, seed: int, steps: int, fraction: float = 1.0, **options: int
    ):
        super().__init__(len(index), crops_per_minibatch, seed, steps, **options)
        self.index = index
        self.fraction = fraction
        self.images_with = {class_id: index.images_with(class_id) for class_id in range(len(index.classes))}
        self.present = np.array([class_id for class_id, images in self.images_with.items() if len(images)], np.intp)
        if not len(self.present):
            raise ValueError(
                f"class-uniform sampling: none of the {len(index.classes)} classes has a labelled pixel in the "
                "training split; check the labels, or choose uniform sampling"
            )

    def keys(self, epoch: int) -> list[Draw]:
        """The draws of one epoch: `fraction` of them class-uniform, the rest uniform, in random order."""
        rng = _generator(self.seed, epoch, stream=1)
        count = round(self.fraction * self.draws)
        class_uniform = iter(self._class_uniform_draws(count, rng))
        uniform = iter(_rounds(np.arange(self.images), self.draws, rng).tolist())
        draws = []
        for place, is_class_uniform in enumerate((rng.permutation(self.draws) < count).tolist()):
            if is_class_uniform:
                class_id, image, pixel = next(class_uniform)
                draws.append(Draw(epoch, image, place, class_id, pixel))
            else:
                draws.append(Draw(epoch, next(uniform), place))
        return draws

    def _class_uniform_draws(self, count: int, rng: np.random.Generator) -> list[tuple[int, int, tuple[int, int]]]:
        """`count` draws of (class, image, pixel)."""
        classes = _rounds(self.present, count, rng)
        images = np.empty(count, np.intp)
        for class_id in self.present:
            places = np.flatnonzero(classes == class_id)
            images[places] = _rounds(self.images_with[class_id], len(places), rng)
        drawn = []
        for class_id, image, share in zip(classes.tolist(), images.tolist(), rng.random(count).tolist(), strict=True):
            pixels = self.index.pixels(image, class_id)
            row, column = pixels[int(share * len(pixels))].tolist()
            drawn.append((class_id, image, (row, column)))
        return drawn


def _rounds(items: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """The first `count` items of an endless series of permutations of `items`."""
    rounds = [rng.permutation(items) for _ in range(-(-count // len(items)))]
    return np.concatenate(rounds)[:count] if rounds else items[:0]


def _generator(seed: int, epoch: int, stream: int) -> np.random.Generator:
    """Random numbers of an epoch that no crop gets.

    Crops are seeded by (seed, epoch, index), and numpy treats (seed, epoch) and (seed, epoch, 0) as the same seed: the
    spawn key separates them.
    """
    return np.random.default_rng(np.random.SeedSequence([seed, epoch], spawn_key=(stream,)))
