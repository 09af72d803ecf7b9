import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datasets import ClassIndex, ClassUniformMinibatches, ShuffledMinibatches, minibatches_per_epoch


def index_of(counts: np.ndarray, positions: int = 3) -> ClassIndex:
    """Pixel n of class c in image i lies at (i, 100 c + n)."""
    places = [
        (image, 100 * class_id + n)
        for image, row in enumerate(counts)
        for class_id, count in enumerate(row)
        for n in range(min(count, positions))
    ]
    names = tuple(f"class {class_id}" for class_id in range(counts.shape[1]))
    return ClassIndex(names, counts, np.array(places, np.uint16).reshape(-1, 2), positions)


@settings(max_examples=50)
@given(images=st.integers(1, 40), crops=st.integers(1, 40), epochs=st.integers(1, 3), seed=st.integers(0, 2**40))
def test_every_image_at_most_once_per_epoch_in_full_minibatches(images, crops, epochs, seed):
    if crops > images:
        return
    per_epoch = images // crops
    minibatches = list(ShuffledMinibatches(images, crops, seed=seed, steps=per_epoch * epochs))
    assert all(len(minibatch) == crops for minibatch in minibatches)
    for epoch in range(epochs):
        keys = [key for minibatch in minibatches[epoch * per_epoch : (epoch + 1) * per_epoch] for key in minibatch]
        assert {key[0] for key in keys} == {epoch}
        indices = [key[1] for key in keys]
        assert len(set(indices)) == len(indices) == per_epoch * crops and set(indices) <= set(range(images))


@pytest.mark.parametrize("kind", [ShuffledMinibatches, ClassUniformMinibatches])
def test_starting_late_gives_the_tail(kind):
    source, options = (26, {}) if kind is ShuffledMinibatches else (index_of(np.ones((26, 5), int)), {"fraction": 0.7})
    options.update(crops_per_minibatch=4, seed=3, steps=30)
    whole = list(kind(source, **options))
    for start in (0, 1, 7, 12, 13, 30):
        resumed = kind(source, **options, start_step=start)
        assert list(resumed) == whole[start:] and len(resumed) == 30 - start


@pytest.mark.parametrize("kind", [ShuffledMinibatches, ClassUniformMinibatches])
def test_an_epoch_depends_on_seed_and_epoch_only(kind):
    source = 40 if kind is ShuffledMinibatches else index_of(np.ones((40, 5), int))
    sampler = kind(source, crops_per_minibatch=4, seed=5, steps=20)
    longer = kind(source, crops_per_minibatch=8, seed=5, steps=900, rank=1, world_size=2)
    other_seed = kind(source, crops_per_minibatch=4, seed=6, steps=20)
    assert sampler.keys(1) == longer.keys(1)
    assert [key[1:] for key in sampler.keys(0)] != [key[1:] for key in sampler.keys(1)]
    assert sampler.keys(0) != other_seed.keys(0)


def test_classes_without_pixels_are_named():
    absent = "class-uniform sampling: none of the 3 classes has a labelled pixel.*choose uniform sampling"
    with pytest.raises(ValueError, match=f"^{absent}"):
        ClassUniformMinibatches(index_of(np.zeros((5, 3), int)), 1, 0, 1)


@pytest.mark.parametrize("images, times", [(1, {8}), (3, {2, 3}), (7, {1, 2})])
def test_too_few_images_for_a_minibatch_are_drawn_more_than_once(images, times):
    """People first try to overfit one image. No crop repeats: each has a place in the epoch."""
    index = index_of(np.ones((images, 2), int))
    options = dict(crops_per_minibatch=8, seed=4, steps=3)
    for sampler in (
        ShuffledMinibatches(images, **options),
        ClassUniformMinibatches(index, **options),
        ClassUniformMinibatches(index, fraction=0.5, **options),
    ):
        assert sampler.steps_per_epoch == minibatches_per_epoch(images, 8) == 1
        for minibatch in sampler:
            assert {draw.place for draw in minibatch} == {*range(8)}
    drawn = [[draw.image for draw in minibatch] for minibatch in ShuffledMinibatches(images, **options)]
    assert all({*np.bincount(images_drawn)} == times for images_drawn in drawn)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_the_ranks_share_each_minibatch_of_one_process(world_size):
    options = dict(crops_per_minibatch=8, seed=1, steps=7, start_step=2)
    index = index_of(np.ones((30, 4), int))
    for kind, source in ((ShuffledMinibatches, 30), (ClassUniformMinibatches, index)):
        whole = list(kind(source, **options))
        shares = [list(kind(source, **options, rank=rank, world_size=world_size)) for rank in range(world_size)]
        assert [sum(parts, []) for parts in zip(*shares, strict=True)] == whole
        sizes = {len(share) for part in shares for share in part}
        assert min(sizes) == 8 // world_size and max(sizes) - min(sizes) <= 1


def counted(values, classes: int) -> list[int]:
    return np.bincount(list(values), minlength=classes).tolist()


@settings(max_examples=60)
@given(
    images=st.integers(1, 60),
    classes=st.integers(1, 12),
    sparsity=st.floats(0.0, 0.95),
    fraction=st.sampled_from([0.01, 0.25, 0.5, 1.0]),
    seed=st.integers(0, 2**40),
)
def test_class_uniform_epochs(images, classes, sparsity, fraction, seed):
    """The paper's authors draw a class, an image that contains it, and a pixel of the class."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, 6, (images, classes)) * (rng.random((images, classes)) >= sparsity)
    counts[0, 0] = 5
    present = np.flatnonzero(counts.sum(axis=0))
    sampler = ClassUniformMinibatches(index_of(counts), 1, seed=seed, steps=images, fraction=fraction)
    for epoch in range(2):
        draws = sampler.keys(epoch)
        assert len(draws) == images, "an epoch is as long as the split"
        assert [draw.place for draw in draws] == list(range(images)) and {draw.epoch for draw in draws} == {epoch}
        by_class = [draw for draw in draws if draw.pixel is not None]
        assert len(by_class) == round(fraction * images)
        for beginning in range(len(by_class) + 1):
            shares = counted([draw.class_id for draw in by_class[:beginning]], classes)
            shown = [shares[class_id] for class_id in present]
            assert max(shown) - min(shown) <= 1 and sum(shown) == beginning, "equal shares, none of absent classes"
        for draw in by_class:
            assert counts[draw.image, draw.class_id] > 0
            assert draw.pixel[0] == draw.image
            assert draw.pixel[1] - 100 * draw.class_id in range(min(3, counts[draw.image, draw.class_id]))
        for class_id in present:
            eligible = np.flatnonzero(counts[:, class_id])
            used = counted([draw.image for draw in by_class if draw.class_id == class_id], images)
            assert max(used[image] for image in eligible) - min(used[image] for image in eligible) <= 1
        by_image = [draw.image for draw in draws if draw.pixel is None]
        assert len(set(by_image)) == len(by_image)


def test_images_and_pixels_of_a_class_are_as_likely_as_each_other():
    counts = np.zeros((50, 2), int)
    counts[:, 0] = 1
    counts[[3, 8, 20, 41, 49], 1] = 9
    sampler = ClassUniformMinibatches(index_of(counts), 1, seed=0, steps=1)
    draws = [draw for epoch in range(60) for draw in sampler.keys(epoch) if draw.class_id == 1]
    assert len(draws) == 60 * 25
    assert np.unique([draw.image for draw in draws], return_counts=True)[1].tolist() == [300] * 5
    pixels = counted([draw.pixel[1] - 100 for draw in draws], 3)
    assert min(pixels) > 430 and max(pixels) < 570  # 500 each
    sampler = ClassUniformMinibatches(index_of(np.ones((100, 3), int)), 1, seed=0, steps=1, fraction=0.5)
    first = [sampler.keys(epoch)[0].pixel is None for epoch in range(100)]  # draws by image lie anywhere
    assert 25 < sum(first) < 75
