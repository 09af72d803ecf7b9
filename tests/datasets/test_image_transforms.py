from io import BytesIO

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import transforms
from torchvision.transforms import functional as F
from torchvision.transforms import v2

from datasets import CentreCrop, ColourJitter, Lighting, PaddedCrop, RandomResizedCrop, ResizedRandomCrop, TenCrops
from datasets.image_transforms import IMAGENET_COLOURS
from tests.datasets.classification_trees import encoded, photograph

SIZES = [(375, 500), (500, 333), (120, 90), (1100, 821)]


def as_jpeg(seed: int, size: tuple[int, int]) -> tuple[np.ndarray, Image.Image]:
    """A decoded JPEG as array and as Pillow's image."""
    image = Image.open(BytesIO(encoded(photograph(seed, size), quality=95))).convert("RGB")
    return np.array(image), image


def difference(ours: np.ndarray, reference: Image.Image) -> int:
    """The largest difference in levels."""
    return np.abs(ours.astype(int) - np.asarray(reference)).max()


@pytest.mark.parametrize("size", SIZES)
def test_random_resized_crops_are_those_of_torchvision_on_pillow_images(size):
    pixels, image = as_jpeg(1, size)
    transform = RandomResizedCrop(224, flip=0, colours=())
    for seed in range(12):
        top, left, height, width = transform.draw(size, np.random.default_rng(seed))
        ours = transform(pixels, np.random.default_rng(seed))
        assert ours.shape == (224, 224, 3) and ours.dtype == np.uint8
        assert difference(ours, F.resized_crop(image, top, left, height, width, [224, 224])) <= 1


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("resize, crop", [(256, 224), (366, 320), (64, 64)])
def test_centre_and_ten_crops_are_those_of_torchvision_on_pillow_images(size, resize, crop):
    pixels, image = as_jpeg(2, size)
    short = transforms.Resize(resize)(image)
    assert difference(CentreCrop(resize, crop)(pixels), transforms.CenterCrop(crop)(short)) <= 1
    ten, references = TenCrops(resize, crop)(pixels), transforms.TenCrop(crop)(short)
    assert ten.shape == (10, crop, crop, 3)
    for ours, reference in zip(ten, references, strict=True):
        assert difference(ours, reference) <= 1


def test_random_crops_lie_in_the_resized_image():
    pixels, image = as_jpeg(4, (300, 400))
    short = np.asarray(transforms.Resize(64)(image)).astype(int)
    transform, places = ResizedRandomCrop(64, 48, flip=0, colours=()), set()
    for seed in range(60):
        crop = transform(pixels, np.random.default_rng(seed))
        windows = np.lib.stride_tricks.sliding_window_view(short, (48, 48, 3))[:, :, 0]
        off = np.abs(windows - crop).max(axis=(2, 3, 4))
        assert off.min() <= 1
        places.add(tuple(np.argwhere(off == off.min())[0].tolist()))
    rows, columns = zip(*places, strict=True)
    assert (min(rows), max(rows)) == (0, 16) and min(columns) <= 2 and max(columns) >= 35  # of 0 to 16, 0 to 37


def test_the_resized_part_has_an_area_and_ratio_in_range():
    transform = RandomResizedCrop(scale=(0.2, 0.5), ratio=(0.5, 2))
    rng = np.random.default_rng(0)
    parts = np.array([transform.draw((300, 400), rng) for _ in range(4000)])
    top, left, height, width = parts.T
    shares, ratios = height * width / (300 * 400), width / height
    assert 0.195 < shares.min() < 0.21 and 0.49 < shares.max() < 0.505
    assert 0.49 < ratios.min() < 0.53 and 1.9 < ratios.max() < 2.03
    assert abs(np.median(np.log(ratios))) < 0.05
    assert (top >= 0).all() and (left >= 0).all() and (top + height == 300).any() and (left + width == 400).any()
    assert (top + height <= 300).all() and (left + width <= 400).all()
    whole = RandomResizedCrop(scale=(1, 1))  # of a very long image, the middle
    for size, part in (((20, 400), (0, 186, 20, 27)), ((400, 20), (186, 0, 27, 20)), ((1, 1), (0, 0, 1, 1))):
        assert whole.draw(size, rng) == part


def test_flips_mirror_half_of_the_crops():
    pixels, _ = as_jpeg(5, (64, 80))
    for transform in (RandomResizedCrop(32, (1, 1), (1, 1.3), colours=()), ResizedRandomCrop(32, 32, colours=())):
        mirrored = 0
        for seed in range(200):
            crop = transform(pixels, np.random.default_rng(seed))
            plain = type(transform)(**{**vars(transform), "flip": 0})(pixels, np.random.default_rng(seed))
            assert np.array_equal(crop, plain) or np.array_equal(crop, plain[:, ::-1])
            mirrored += not np.array_equal(crop, plain)
        assert 70 < mirrored < 130


def test_colours_change_the_crop_last_and_do_not_change_its_place():
    pixels, _ = as_jpeg(6, (100, 120))
    for transform in (RandomResizedCrop(48), ResizedRandomCrop(64, 48)):
        assert transform.colours == IMAGENET_COLOURS == (ColourJitter(0.4, 0.4, 0.4), Lighting(0.1))
        rng = np.random.default_rng(7)
        crop = type(transform)(**{**vars(transform), "colours": ()})(pixels, rng)
        for change in IMAGENET_COLOURS:
            crop = change(crop, rng)
        assert np.array_equal(transform(pixels, np.random.default_rng(7)), crop)


def test_lighting_adds_alexnets_shift():
    """The shifts' covariance is strength^2 times the covariance of ImageNet's colours (AlexNet, section 4.1)."""
    grey = np.full((1, 1, 3), 128, np.uint8)
    rng = np.random.default_rng(0)
    shifts = np.array([Lighting(0.1)(grey, rng)[0, 0].astype(float) - 128 for _ in range(20000)])
    values = np.array([0.2175, 0.0188, 0.0045])
    vectors = np.array([[-0.5675, 0.7192, 0.4009], [-0.5808, -0.0045, -0.8140], [-0.5836, -0.6948, 0.4203]])
    expected = (255 * 0.1) ** 2 * vectors @ np.diag(values**2) @ vectors.T
    assert np.abs(shifts.mean(axis=0)).max() < 0.1
    assert np.abs(np.cov(shifts.T) - expected - np.eye(3) / 12).max() < 0.03 * expected.max()  # 1/12: rounding
    pixels, _ = as_jpeg(8, (30, 40))  # all its pixels are shifted alike
    bright = Lighting(2.0)(pixels, np.random.default_rng(1)).astype(int) - pixels
    inside = [bright[..., c][(pixels[..., c] > 150) & (pixels[..., c] < 160)] for c in range(3)]
    assert all(len({*values.tolist()}) == 1 for values in inside) and len({values[0] for values in inside}) > 1
    for value in (0, 255):
        extreme = Lighting(1e4)(np.full((2, 2, 3), value, np.uint8), np.random.default_rng(2))
        assert {*extreme.ravel().tolist()} <= {0, 255}


def padded_reference(image: np.ndarray, corner: np.ndarray, mirrored: bool, fill: list, padding: int) -> np.ndarray:
    """torchvision's Pad, crop and flip: uint8 (3, H, W) -> (3, 32, 32)."""
    padded = v2.functional.pad(torch.from_numpy(image), padding, fill)
    crop = F.crop(padded, *corner.tolist(), 32, 32)
    return (F.hflip(crop) if mirrored else crop).numpy()


@pytest.mark.parametrize("padding", [0, 2, 4])
def test_a_minibatch_of_padded_crops_is_what_torchvision_makes_one_by_one(padding):
    pixels = np.random.default_rng(0).integers(0, 256, (50, 3, 32, 32), dtype=np.uint8)
    transform = PaddedCrop(32, padding, fill=(125.4, 123, 113.6))
    corners, mirrored = transform.draw((32, 32), 50, np.random.default_rng(1))
    crops = transform.minibatch(pixels, corners, mirrored)
    assert crops.dtype == np.uint8 and crops.flags.c_contiguous
    for number in range(50):
        expected = padded_reference(pixels[number], corners[number], mirrored[number], [125, 123, 114], padding)
        assert np.array_equal(crops[number], expected)


def test_padded_crops_are_drawn_everywhere_and_mirrored_half_of_the_time():
    corners, mirrored = PaddedCrop(32, 4).draw((32, 32), 20000, np.random.default_rng(0))
    counts = np.bincount(corners[:, 0] * 9 + corners[:, 1], minlength=81)
    assert counts.min() > 170 and counts.max() < 330 and 9700 < mirrored.sum() < 10300  # 247 each


def test_a_crop_larger_than_the_padded_images_is_named():
    with pytest.raises(ValueError, match="size=32 is larger than .* 30x28 pixels"):
        PaddedCrop(32, 1).draw((28, 30), 1, rng=None)
