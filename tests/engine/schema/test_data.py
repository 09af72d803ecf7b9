"""Values of the keys of datasets, and what is said about crops."""

import pytest

from tests.runs import run_config

WRONG = "[5,5] [9,5] [-1,5] [0,65536] [5] [0,1,2] [0,1,2,3] [0,1,2,3,9,5]"


@pytest.mark.parametrize("range16", WRONG.split())
def test_a_range_of_16_bit_values_has_a_lowest_and_a_highest_value(range16):
    with pytest.raises(ValueError, match=r"data.range16=\[.*\]: expected .*lowest value"):
        run_config(f"data.range16={range16}")


@pytest.mark.parametrize(
    "keys, expected",
    [
        (("data.crop_size=256",), "63 % of a crop is padding: give data.crop_size=128"),
        (("data.crop_size=1000",), "98 % of a crop is padding: give data.crop_size=128"),
        (("data.crop_size=160",), "26 % of a crop is padding: give data.crop_size=128"),
        (("data.crop_size=150",), "22 % of a crop"),
        (("data.crop_size=128",), None),
        (("data.crop_size=256", "data.scale=[2.5,3]"), None),
        (("data.crop_size=256", "data.base_size=512"), None),
        (("data.crop_size=64",), None),
        (("data.crop_size=64", "data.crop_aspect=4"), "32 % of a crop is padding: give data.crop_size=32"),
    ],
)
def test_crops_that_are_a_fifth_padding_are_named_with_a_size_that_fits(keys, expected):
    doubts = run_config("data=folder", "data.root=gone", *keys).data.doubts_of_sizes([(128, 96, 30)])
    assert [line[: len(expected or "")] for line in doubts] == ([] if expected is None else [expected])


def test_crops_that_show_little_of_an_image_are_named_with_the_keys():
    data = run_config("data=folder", "data.root=gone", "data.crop_size=256").data
    (doubt,) = data.doubts_of_sizes([(4000, 3000, 9)])  # 0.5 % at factor 1
    assert (
        "% of an image on average (data.crop_size=256, images of up to 4000 pixels): give data.base_size=512" in doubt
    )
    data.base_size = 512
    assert data.doubts_of_sizes([(4000, 3000, 9)]) == []
