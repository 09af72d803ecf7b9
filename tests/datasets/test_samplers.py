import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datasets import ShuffledMinibatches


@settings(max_examples=50, deadline=None, derandomize=True)
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


def test_every_image_exactly_once_where_the_minibatches_divide_the_epoch():
    minibatches = list(ShuffledMinibatches(images=12, crops_per_minibatch=4, seed=0, steps=3))
    assert sorted(index for minibatch in minibatches for _, index in minibatch) == list(range(12))


@pytest.mark.parametrize("start", [0, 1, 7, 12, 13, 30])
def test_starting_late_gives_the_tail(start):
    whole = list(ShuffledMinibatches(images=26, crops_per_minibatch=4, seed=3, steps=30))
    resumed = ShuffledMinibatches(images=26, crops_per_minibatch=4, seed=3, steps=30, start_step=start)
    assert list(resumed) == whole[start:]
    assert len(resumed) == 30 - start


def test_order_depends_on_seed_and_epoch_only():
    sampler = ShuffledMinibatches(images=100, crops_per_minibatch=10, seed=5, steps=20)
    longer = ShuffledMinibatches(images=100, crops_per_minibatch=7, seed=5, steps=900)
    other = ShuffledMinibatches(images=100, crops_per_minibatch=10, seed=6, steps=20)
    assert sampler.order(1) == longer.order(1)
    assert sampler.order(0) != sampler.order(1)
    assert sampler.order(0) != other.order(0)


def test_images_left_out_change_from_epoch_to_epoch():
    sampler = ShuffledMinibatches(images=11, crops_per_minibatch=10, seed=0, steps=40)
    left_out = [set(range(11)) - {index for _, index in minibatch} for minibatch in sampler]
    assert len(set(map(tuple, left_out))) > 5


def test_the_order_and_the_first_images_crop_have_different_random_streams():
    order = ShuffledMinibatches(images=1000, crops_per_minibatch=1, seed=0, steps=1).order(0)
    assert order != np.random.default_rng([0, 0, 0]).permutation(1000).tolist()


def test_too_few_images_names_both_numbers_and_the_fix():
    with pytest.raises(ValueError, match="data.crops_per_minibatch=16 is more than the 10 images.*at most 10"):
        ShuffledMinibatches(images=10, crops_per_minibatch=16, seed=0, steps=1)
    with pytest.raises(ValueError, match="data.crops_per_minibatch=0 must be at least 1"):
        ShuffledMinibatches(images=10, crops_per_minibatch=0, seed=0, steps=1)
