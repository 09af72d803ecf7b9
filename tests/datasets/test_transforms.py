import cv2
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchvision.transforms import v2

from datasets import TrainingTransform
from datasets.image_transforms import seeded
from datasets.transforms import base_scale, crop_shares, scale_and_crop, scale_size

FILL, IGNORE = (10, 20, 30), 255


def resize_then_crop(image, label, scaled_size, offset, crop_size):
    """The definition: resize the whole image, pad it, cut out the crop."""
    height, width = scaled_size
    image = cv2.resize(image, (width, height), interpolation=cv2.INTER_LINEAR)
    label = cv2.resize(label, (width, height), interpolation=cv2.INTER_NEAREST_EXACT)
    margin = [(max(0, -offset[axis]), max(0, offset[axis] + crop_size[axis] - scaled_size[axis])) for axis in (0, 1)]
    borders = (*margin[0], *margin[1])
    image = cv2.copyMakeBorder(image, *borders, cv2.BORDER_CONSTANT, value=FILL)
    label = cv2.copyMakeBorder(label, *borders, cv2.BORDER_CONSTANT, value=IGNORE)
    top, left = offset[0] + margin[0][0], offset[1] + margin[1][0]
    window = slice(top, top + crop_size[0]), slice(left, left + crop_size[1])
    return image[window], label[window]


def noise(size: tuple[int, int], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """An image, the hardest for interpolation, and a label."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (*size, 3), dtype=np.uint8), rng.integers(0, 19, size, dtype=np.uint8)


PLACES = {"place": st.tuples(st.floats(0, 1), st.floats(0, 1)), "seed": st.integers(0, 99)}


@settings(max_examples=100)
@given(
    size=st.tuples(st.integers(2, 90), st.integers(2, 90)),
    scale=st.floats(0.7, 2.0),
    crop_size=st.tuples(st.integers(1, 80), st.integers(1, 80)),
    **PLACES,
)
def test_equals_resize_then_crop(size, scale, crop_size, place, seed):
    image, label = noise(size, seed)
    scaled_size = scale_size(size, scale)
    offset = tuple(
        round(share * (whole - crop)) for share, whole, crop in zip(place, scaled_size, crop_size, strict=True)
    )
    expected_image, expected_label = resize_then_crop(image, label, scaled_size, offset, crop_size)
    got_image, got_label = scale_and_crop(image, label, scaled_size, offset, crop_size, fill=FILL)
    assert np.abs(got_image.astype(int) - expected_image).max() <= 2
    assert np.array_equal(got_label, expected_label)


def block_means(image: np.ndarray, axis: int, block: int) -> np.ndarray:
    """Along one axis: means of `block` pixels; the last block is filled with the last pixel."""
    border = [(0, 0)] * 3
    border[axis] = (0, -image.shape[axis] % block)
    image = np.moveaxis(np.pad(image.astype(float), border, mode="edge"), axis, 0)
    return np.moveaxis(image.reshape(-1, block, *image.shape[1:]).mean(axis=1), 0, axis)


def interpolated(image: np.ndarray, axis: int, positions: np.ndarray) -> np.ndarray:
    """Along one axis: the image at real positions, where pixel i is at i; beyond its ends the last pixel."""
    weights = [np.interp(positions, range(image.shape[axis]), row) for row in np.eye(image.shape[axis])]
    return np.moveaxis(np.tensordot(image, weights, (axis, 0)), -1, axis)


@settings(max_examples=100)
@given(
    size=st.tuples(st.integers(20, 90), st.integers(20, 90)),
    step=st.floats(1.0, 6.0),
    crop_size=st.tuples(st.integers(1, 50), st.integers(1, 50)),
    **PLACES,
)
def test_an_antialiased_crop_is_cut_out_of_the_whole_averaged_and_resized_image(size, step, crop_size, place, seed):
    """Blocks of 0.8 steps start at the image's first pixel, not at the crop's. Labels are not averaged."""
    image, label = noise(size, seed)
    scaled_size = scale_size(size, 1 / step)
    offset = tuple(
        round(share * max(0, whole - crop)) for share, whole, crop in zip(place, scaled_size, crop_size, strict=True)
    )
    got, got_label = scale_and_crop(image, label, scaled_size, offset, crop_size, FILL)
    aliased, plain_label = scale_and_crop(image, label, scaled_size, offset, crop_size, FILL, antialias=False)
    assert np.array_equal(got_label, plain_label)
    expected, blocks = image, []
    for axis in (0, 1):
        blocks.append(max(1, round(0.8 * size[axis] / scaled_size[axis])))
        expected = block_means(expected, axis, blocks[-1])
    for axis in (0, 1):
        centres = (np.arange(scaled_size[axis]) + 0.5) * size[axis] / scaled_size[axis]
        expected = interpolated(expected, axis, centres / blocks[axis] - 0.5)
    height, width = (min(crop, whole) for crop, whole in zip(crop_size, scaled_size, strict=True))
    expected = expected[offset[0] :, offset[1] :][:height, :width]
    assert np.abs(got[:height, :width] - expected).max() <= 3  # rounded twice, positions to 1/32 of a block
    if blocks == [1, 1]:
        assert np.array_equal(got, aliased)


def picture(height: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """A label that names the column of each pixel, and an image with the label in every channel."""
    label = np.broadcast_to(np.arange(width, dtype=np.uint8), (height, width)).copy()
    return np.repeat(label[..., None], 3, axis=2), label


def test_half_of_the_crops_are_mirrored_images_and_labels_alike():
    image, label = picture(8, 16)
    rng = np.random.default_rng(0)
    for options, times, low, high in (({"flip": 0.0}, 1, 0, 0), ({"flip": 1.0}, 1, 1, 1), ({}, 2000, 901, 1099)):
        transform, mirrored = TrainingTransform((8, 16), scale=(1.0, 1.0), **options), 0
        for _ in range(times):
            crop, crop_label = transform(image, label, rng)
            step = -1 if crop_label[0, 0] == 15 else 1
            assert np.array_equal(crop, image[:, ::step]) and np.array_equal(crop_label, label[:, ::step])
            mirrored += step == -1
        assert low <= mirrored <= high


def test_crops_reach_every_position_and_padding_is_fill_and_ignore():
    image, label = np.full((10, 12, 3), 200, np.uint8), np.full((10, 12), 5, np.uint8)
    transform = TrainingTransform((20, 16), scale=(1.0, 1.0), fill=(123.7, 116.3, 103.5))
    rng = np.random.default_rng(0)
    corners = set()
    for _ in range(800):
        image_crop, label_crop = transform(image, label, rng)
        assert image_crop.shape == (20, 16, 3) and label_crop.shape == (20, 16)
        inside = label_crop != IGNORE
        assert inside.sum() == 120 and (label_crop[inside] == 5).all()
        assert (image_crop[inside] == 200).all() and (image_crop[~inside] == (124, 116, 104)).all()
        corners.add(tuple(np.argwhere(inside)[0]))
    assert corners == {(top, left) for top in range(11) for left in range(5)}
    image, label = picture(6, 10)
    transform = TrainingTransform((6, 4), scale=(1.0, 1.0), flip=0.0)
    assert {int(transform(image, label, rng)[1][0, 0]) for _ in range(200)} == set(range(7))


@pytest.mark.parametrize("crop", [(256, 256), (128, 128), (60, 300)])
@pytest.mark.parametrize("base_size", [None, 160])
def test_the_share_of_padding_is_expected_from_the_sizes_of_images(crop, base_size):
    rng, drawn = np.random.default_rng(0), []
    transform = TrainingTransform(crop, base_size=base_size)
    for width, height in [(128, 96)] * 1500 + [(40, 250)] * 500:
        (rows, columns), _, _ = transform.draw((height, width), rng)
        drawn.append(1 - min(rows, crop[0]) * min(columns, crop[1]) / (crop[0] * crop[1]))
    _, expected = crop_shares([(128, 96, 3), (40, 250, 1)], crop, transform.scale, base_size)
    assert abs(np.mean(drawn) - expected) < 0.02


def test_scales_cover_the_papers_range():
    image, label = np.zeros((100, 100, 3), np.uint8), np.zeros((100, 100), np.uint8)
    transform = TrainingTransform((300, 300))
    rng = np.random.default_rng(0)
    sizes = [int((transform(image, label, rng)[1] != IGNORE).sum() ** 0.5) for _ in range(500)]
    assert min(sizes) in range(70, 73) and max(sizes) in range(198, 201)
    assert 130 < np.mean(sizes) < 140


@pytest.mark.parametrize("size, expected", [((30, 50), (12, 20)), ((50, 30), (20, 12)), ((6, 10), (12, 20))])
def test_base_size_is_the_longest_side_at_scale_one(size, expected):
    rng, (image, label) = np.random.default_rng(0), noise(size, 0)
    transform = TrainingTransform(expected, scale=(1.0, 1.0), flip=0.0, base_size=20, antialias=False)
    crop, crop_label = transform(image, label, rng)
    assert np.abs(crop.astype(int) - cv2.resize(image, expected[::-1])).max() <= 2
    assert np.array_equal(crop_label, cv2.resize(label, expected[::-1], interpolation=cv2.INTER_NEAREST_EXACT))
    smooth, _ = TrainingTransform(expected, scale=(1.0, 1.0), flip=0.0, base_size=20)(image, label, rng)
    assert np.array_equal(smooth, crop) == (size == (6, 10))  # which is enlarged


@settings(max_examples=150)
@given(
    size=st.tuples(st.integers(1, 90), st.integers(1, 90)),
    scale=st.floats(0.2, 3.0),
    crop_size=st.tuples(st.integers(1, 80), st.integers(1, 80)),
    place=st.tuples(st.sampled_from([0.0, 1.0]) | st.floats(0, 1), st.sampled_from([0.0, 1.0]) | st.floats(0, 1)),
    flip=st.sampled_from([0.0, 1.0]),
    base_size=st.sampled_from([None, 30, 200]),
    seed=st.integers(0, 99),
)
def test_a_crop_contains_the_pixel_it_is_told_to(size, scale, crop_size, place, flip, base_size, seed):
    """Larger and smaller images than the crop, pixels on borders and in corners, mirrored or not.

    The label holds the coordinate of its pixels along one axis. An image that shrinks loses some of its pixels: the
    crop then shows a neighbour, at most half a pixel of the scaled image (plus rounding) away. But a class is never
    lost: where its only pixel would be, a pixel of the crop gets it, and no other changes.
    """
    pixel = tuple(round(share * (length - 1)) for share, length in zip(place, size, strict=True))
    transform = TrainingTransform(crop_size, scale=(scale, scale), flip=flip, base_size=base_size)
    image = np.zeros((*size, 3), np.uint8)
    scaled_size = scale_size(size, scale * base_scale(size, base_size))
    near = np.ones(crop_size, bool)
    for axis in (0, 1):
        coordinates = np.arange(size[axis], dtype=np.uint8)
        label = np.broadcast_to(coordinates[:, None] if axis == 0 else coordinates, size).copy()
        _, crop = transform(image, label, np.random.default_rng(seed), pixel)
        lost = 0 if scaled_size[axis] >= size[axis] else size[axis] / scaled_size[axis] / 2 + 1
        near &= (crop != IGNORE) & (np.abs(crop.astype(int) - pixel[axis]) <= lost)
    assert near.any()
    label = np.zeros(size, np.uint8)
    label[pixel] = 1
    _, without = transform(image, label, np.random.default_rng(seed), pixel)
    _, crop = transform(image, label, np.random.default_rng(seed), pixel, class_id=1)
    assert (crop == 1).sum() == max(1, (without == 1).sum()) and ((crop == without) | (crop == 1)).all()
    assert near[crop == 1].all()


def test_the_pixel_lies_anywhere_in_the_crop_and_the_crop_in_the_image():
    image, label = np.zeros((40, 60, 3), np.uint8), np.zeros((40, 60), np.uint8)
    label[20, 30] = label[0, 59] = 1
    transform = TrainingTransform((4, 5), scale=(1.0, 1.0))
    rng = np.random.default_rng(0)
    seen = np.zeros((4, 5), int)
    for _ in range(4000):
        seen += transform(image, label, rng, pixel=(20, 30))[1]
    assert seen.sum() == 4000 and seen.min() > 130 and seen.max() < 270  # 200 each
    transform = TrainingTransform((16, 16), scale=(1.0, 1.0), flip=0.0)
    for _ in range(20):
        _, crop = transform(image, label, rng, pixel=(0, 59))
        assert crop[0, 15] == 1 and (crop != IGNORE).all()


def test_a_pixel_changes_neither_flip_nor_scale():
    """The random numbers are drawn in the same order, so sampling strategies differ only in the window."""
    image, label = picture(48, 64)
    transform = TrainingTransform((100, 140))  # the whole image at every scale
    for seed in range(10):
        free, with_pixel = (transform(image, label, np.random.default_rng(seed), pixel)[1] for pixel in (None, (5, 60)))
        assert np.array_equal(free, with_pixel)


JITTER = v2.ColorJitter(brightness=0.4, contrast=0.7, saturation=1.5, hue=0.2)


@pytest.mark.parametrize("size", [(60, 80), (20, 30), (20, 90)], ids=["inside", "padded", "padded above and below"])
def test_jitter_changes_neither_the_crop_nor_its_padding_nor_the_label(size):
    image, label = noise(size, 0)
    original = image.copy()
    options = dict(crop_size=(40, 50), fill=FILL)
    changed = 0
    for seed in range(20):
        after_plain, after_crop = np.random.default_rng(seed), np.random.default_rng(seed)
        plain, plain_label = TrainingTransform(**options)(image, label, after_plain)
        got, got_label = TrainingTransform(**options, colour_jitter=JITTER)(image, label, np.random.default_rng(seed))
        padding = plain_label == IGNORE
        assert np.array_equal(got_label, plain_label) and (got[padding] == FILL).all()
        changed += not np.array_equal(got, plain)
        # A change that depends on the whole image sees only the visible part.
        rows, columns = (np.flatnonzero((~padding).any(axis=axis)) for axis in (1, 0))
        seen = np.ix_(rows, columns)
        *_, mirrored = TrainingTransform(**options).draw(size, after_crop)
        assert after_plain.bit_generator.state == after_crop.bit_generator.state  # nothing is drawn without jitter
        visible = torch.from_numpy(np.ascontiguousarray(plain[seen][:, :: -1 if mirrored else 1])).permute(2, 0, 1)
        expected = seeded(JITTER, visible, int(after_crop.integers(2**63))).permute(1, 2, 0).numpy()
        assert np.array_equal(got[seen], expected[:, :: -1 if mirrored else 1])
    assert changed == 20 and np.array_equal(image, original)
