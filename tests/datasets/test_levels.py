"""What is said about images that show a network few levels, or nothing, or whose values are cut off."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from datasets import folder, image_folder, verify
from datasets.levels import doubts_of_levels, use_of
from tests import trees

RNG = np.random.default_rng(3)


def dataset_folder(root: Path, image: np.ndarray) -> Path:
    """A dataset of three equal images."""
    for name in "abc":
        trees.write(root / "train" / "labels" / f"{name}.png", (image[..., 0] % 2).astype(np.uint8))
        (file := root / "train" / "images" / f"{name}.npy").parent.mkdir(exist_ok=True)
        np.save(file, image)
    (root / "classes.json").write_text(json.dumps({"classes": [{"name": "a"}, {"name": "b"}]}))
    return root


def noise(*ranges: tuple[int, int], dtype: type = np.uint8) -> np.ndarray:
    """A channel for each range."""
    return np.stack([RNG.integers(low, high + 1, (60, 80), dtype=dtype) for low, high in ranges], axis=2)


FINE, FLOATS, BLACK = (0, 255), (0, 1), (0, 0)
CURE = "write them with values up to 255, such as floats of 0 to 1 times 255"
SHALLOW = {
    "floats of 0 to 1": ((FLOATS,) * 3, f"use 2 of the 256 levels that a network sees, as they hold .* 0 to 1: {CURE}"),
    "black": ((BLACK,) * 3, "show nothing, as each channel is 0: check the files"),
    "infrared of 0 to 1": ((FINE,) * 3 + (FLOATS,), f"levels that a network sees in channel 4, as .* 0 to 1: {CURE}"),
    "black infrared": ((FINE,) * 3 + (BLACK,), "show nothing in channel 4, which has one value: check the files"),
    "a dark channel of three": ((FINE, FINE, (20, 40)), "use 21 of the 256 levels that a network sees in channel 3,"),
    "fluorescence": ((BLACK, FINE, BLACK), None),
    "ordinary": (((10, 200),) * 4, None),
}


@pytest.mark.parametrize("kind", SHALLOW)
def test_images_of_8_bits_that_show_little_or_nothing_are_named(kind, tmp_path):
    ranges, expected = SHALLOW[kind]
    dataset = folder(dataset_folder(tmp_path / "data", noise(*ranges)), "train", channels=len(ranges))
    for _ in range(2):  # the second time it is remembered
        doubts = [sentence for sentence in verify(dataset, workers=0) if "8-bit" in sentence]
        assert len(doubts) == (expected is not None) and all(
            re.search(f"^8-bit .*{expected}", doubt) for doubt in doubts
        )


@pytest.mark.parametrize("low, high, levels", [(51_241, 52_181, 4), (0, 16_383, 64)])
def test_broken_pixels_and_borders_without_a_value_do_not_count(low, high, levels, tmp_path):
    for name in "ab":
        values = noise((low, high), dtype=np.uint16)
        values[0, :4], values[1:9], values[-9:], values[9, :2, 0] = 30_000, 0, 65_535, (low, high)
        trees.write(tmp_path / "data" / "train" / name / "0.png", values)
    dataset = image_folder(tmp_path / "data", "train")
    assert verify(dataset, workers=0, keys="data.") == [
        f"16-bit images of train use {levels} of the 256 levels that a network sees, as they hold values from {low} to "
        f"{high}: give data.range16=[{low},{high}]"
    ]
    dataset.range16 = low, high
    assert verify(dataset, workers=0, keys="data.") == []


LOW, HEIGHT = (0, 2999), (0, 65_535)
DEEP = {  # ranges of the channels, and the range that is advised
    "reflectances and a height": ([LOW] * 4 + [HEIGHT], [*LOW * 4, *HEIGHT]),
    "three channels": ([LOW, HEIGHT, (500, 900)], [*LOW, *HEIGHT, 500, 900]),
    "a camera of 12 bits": ([(3, 4000), (9, 4095), (0, 3900)], [0, 4095]),
    "a camera and a constant channel": ([(3, 4000), (9, 4095), (0, 3900), (7, 7)], [0, 4095]),
    "all of the range": ([HEIGHT] * 5, None),
}


@pytest.mark.parametrize("kind", DEEP)
def test_channels_of_16_bits_get_a_range_each_if_one_does_not_fit_all(kind, tmp_path):
    """Then every channel that varies has its levels, nothing is cut off, and nothing more is said."""
    ranges, expected = DEEP[kind]
    root = dataset_folder(tmp_path / "data", noise(*ranges, dtype=np.uint16))
    dataset = folder(root, "train", channels=len(ranges))
    doubts = [sentence for sentence in verify(dataset, workers=0, keys="data.") if "levels" in sentence]
    assert len(doubts) == (expected is not None)
    if doubts:
        dataset.range16 = json.loads(re.search(r"give data\.range16=(\[.*\])$", doubts[0])[1])
        assert np.allclose(dataset.range16, expected, atol=40)
        assert verify(dataset, workers=0, keys="data.") == (  # a range is part of what is remembered
            [s for s in verify(dataset, workers=0) if "show nothing in channel 4" in s] * ("constant" in kind)
        )
        image = dataset[0].image
        for place, (low, high) in enumerate(ranges):
            assert low == high or len(np.unique(image[..., place])) > 200
            assert low == high or (image[..., place] == 255).mean() < 0.02


@pytest.mark.parametrize("far, share", [(0.02, None), (0.1, "10%"), (1.0, "100%")])
def test_values_that_a_range_cuts_off_are_named(far, share):
    """In training with a range that fits. 0 and 65535 have no value if they are far from all others."""
    values = noise((1000, 3000), (1000, 3000), (1000, 3000), dtype=np.uint16)
    values[: round(far * 60), :, 1] = 30_000 + 9 * values[: round(far * 60), :, 2]
    values[:, :20, 0], values[:, -20:, 0] = 0, 65_535
    for range16 in ((1000, 3000), (1000, 3000) * 3):
        uses = [use_of(values, range16), use_of(values)]
        doubts = [doubts_of_levels(uses[:1], range16, "images of val", keys) for keys in ("data.", None)]
        if share is None:
            assert doubts == [[], []]
            continue
        outside = f"have up to {share} of an image's pixels outside of 1000 to 3000, made black or white: "
        for (sentence,) in doubts:
            assert sentence.startswith("16-bit images of val ") and outside in sentence
        advice = json.loads(re.search(r"give data\.range16=(\[.*\])$", doubts[0][0])[1])
        assert not any(share_outside > 0.02 for share_outside in use_of(values, advice).clipped)
        assert re.search(
            r": if the training had .* alike; else train another network with range16=\[\d+,", doubts[1][0]
        )
