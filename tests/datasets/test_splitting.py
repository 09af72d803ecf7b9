"""How images are divided: sizes, classes, sources, and nothing left to chance but the seed."""

import re
from collections import Counter

import numpy as np
import pytest

from datasets.splitting import divide_images, sizes_of, source_prefixes

FOLDS, SPLIT = [0.2] * 5, [0.7, 0.15, 0.15]


def holding(pixels: np.ndarray, parts: np.ndarray) -> np.ndarray:
    """Images of each part that hold each class, (parts, classes)."""
    return np.stack([(pixels[parts == part] > 0).sum(axis=0) for part in range(parts.max() + 1)])


@pytest.mark.parametrize(
    "count, shares, sizes",
    [
        (60, SPLIT, [42, 9, 9]),
        (11, FOLDS, [3, 2, 2, 2, 2]),
        (10, [0.26, 0.35, 0.39], [3, 3, 4]),  # of 2.6, 3.5 and 3.9
        (3, SPLIT, [1, 1, 1]),
        (100, [0.29, 0.71], [29, 71]),  # 0.29 * 100 is less than 29 in floating point
    ],
)
def test_sizes_are_those_of_the_largest_remainder_and_no_part_is_empty(count, shares, sizes):
    assert sizes_of(count, shares).tolist() == sizes
    parts = divide_images(np.ones((count, 2), np.int64), [*map(str, range(count))], shares, seed=0)
    assert np.bincount(parts).tolist() == sizes


def test_each_class_is_spread_as_the_images_are():
    """Classes of 5, 20 and 30 of 60 images are as even as they can be, and random ones far more even than by chance.

    Random ones have the chi-square that exchanging images until no exchange lessens it leaves (Kernighan and Lin).
    """
    number = np.arange(60)
    pixels = np.stack([number >= 0, number % 12 == 0, number % 3 == 1, number % 2 == 0], axis=1) * 50
    assert holding(pixels, divide_images(pixels, [*map(str, number)], FOLDS, seed=3)).tolist() == [[12, 1, 4, 6]] * 5
    rng = np.random.default_rng(0)
    pixels = (rng.random((60, 12)) < rng.uniform(0.05, 0.9, 12)) * rng.integers(1, 999, (60, 12))
    for shares, exchanged in ((FOLDS, 3.8), (SPLIT, 1.6)):
        wanted = np.array(shares)[:, None] * (pixels > 0).sum(axis=0)
        sources = [*map(str, number)]
        parts = divide_images(pixels, sources, shares, seed=0)
        by_chance = [abs(holding(pixels, rng.permutation(parts)) - wanted).mean() for _ in range(100)]
        assert abs(holding(pixels, parts) - wanted).mean() < 0.5 * min(by_chance)
        assert ((holding(pixels, parts) - wanted) ** 2 / wanted).sum() <= 1.02 * exchanged
        assert (parts == divide_images(pixels, sources, shares, seed=0)).all()
        assert (parts != divide_images(pixels, sources, shares, seed=1)).any()


@pytest.mark.parametrize("shares", [SPLIT, [0.8, 0.2]])
def test_a_class_of_few_images_is_in_every_part(shares):
    pixels = np.ones((60, 2), np.int64)
    pixels[len(shares) :, 1] = 0  # as many images as parts hold the second class
    for seed in range(3):
        assert holding(pixels, divide_images(pixels, [*map(str, range(60))], shares, seed))[:, 1].tolist() == [1] * len(
            shares
        )


def test_pixels_decide_between_images_that_hold_the_same_classes():
    pixels = np.array([[1, size] for size in (10, 10, 1000, 1000)])
    for seed in range(5):
        parts = divide_images(pixels, [*"abcd"], [0.5, 0.5], seed)
        assert [pixels[parts == part, 1].sum() for part in (0, 1)] == [1010, 1010]


@pytest.mark.parametrize("shares", [FOLDS, SPLIT])
def test_sources_stay_together_in_parts_of_nearly_the_wanted_sizes(shares):
    rng = np.random.default_rng(1)
    sources = [f"site{number}" for number in range(20) for _ in range(rng.integers(1, 9))]
    parts = divide_images((rng.random((len(sources), 6)) < 0.4) * 9, sources, shares, seed=0)
    assert all(len({*parts[np.array(sources) == source]}) == 1 for source in sources)
    assert abs(np.bincount(parts) - sizes_of(len(sources), shares)).max() <= 1
    large_source = [*("a" * 90), *("b" * 5), *("c" * 5)]  # one source is larger than the largest part should be
    assert np.bincount(divide_images(np.ones((100, 2), int), large_source, shares[:3], seed=0)).min() == 5


def test_images_that_have_a_part_keep_it_and_the_others_make_up_for_the_shares():
    pixels, fixed_parts = np.ones((40, 2), np.int64), np.repeat([0, 1, -1], [26, 4, 10])
    pixels[30:34, 1] = 0
    for seed in range(3):
        parts = divide_images(pixels, [*map(str, range(40))], [0.7, 0.3], seed, fixed_parts)
        assert (parts[:30] == fixed_parts[:30]).all() and np.bincount(parts).tolist() == [28, 12]
    sources = [*(f"a{n}" for n in range(26)), *"bbbb", *(f"a{n}" for n in range(5)), *"bbccc"]
    parts = divide_images(pixels, sources, [0.7, 0.3], 0, fixed_parts)
    assert parts[30:37].tolist() == [0] * 5 + [1] * 2 and len({*parts[37:]}) == 1


@pytest.mark.parametrize(
    "names, shared",
    [
        ([f"plot{n // 4}_{n}" for n in range(60)], {f"plot{n}_": 4 for n in range(15)}),
        ([f"s{n // 4}/a{n} (copy)" for n in range(60)], {f"s{n}/a": 4 for n in range(15)}),
        ([f"image{n}" for n in range(60)], {}),  # one for all
        ([f"plot{n // 7}_{n}" for n in range(60)], {}),  # nine, but five parts need ten
        ([f"{n // 2}_{n % 2}" for n in range(60)], {f"{n}_": 2 for n in range(30)}),  # half as many as names
        ([*(f"plot{n // 4}_{n}" for n in range(59)), "extra"], {}),  # one has no number
        ([f"s{n // 9:02}_x{n % 3 * 256}_y{n // 3 % 3 * 256}" for n in range(90)], {f"s{n:02}_x": 9 for n in range(10)}),
        ([f"s{n // 10}_x{n % 10}_y0" for n in range(60)], {}),  # six scenes, and no other beginning
        # Not 15 strips.
        ([f"s{n // 12}_x{n % 12 // 4}_y{n % 4}" for n in range(60)], {f"s{n}_x": 12 for n in range(5)}),
        ([f"2024-01-{n // 4:02}_{n % 4}" for n in range(80)], {f"2024-01-{n:02}_": 4 for n in range(20)}),  # days
    ],
)
def test_beginnings_of_names_may_be_sources(names, shared):
    group, beginnings = source_prefixes(names, 5)
    assert beginnings == shared and bool(group) == bool(shared)
    assert not group or Counter(re.search(group, name)[1] for name in names) == shared
