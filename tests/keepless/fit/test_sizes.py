"""The search for what fits."""

import pytest

from keepless.fit.sizes import largest
from keepless.fit.step_memory import PlannedStep


@pytest.mark.parametrize("budget, expected", [(99, None), (119, 2), (139, 3), (140, 4), (1000, 47)])
def test_the_most_crops_are_found_with_few_traces(budget, expected):
    traced = []

    def peak(crops: int) -> int:
        traced.append(crops)
        return 60 + 20 * crops if crops > 2 else 100  # the first has another peak

    assert largest(peak, budget, 2, step=1, power=1) == expected
    assert len(traced) <= 5


def test_no_more_crops_than_images_are_chosen():
    for budget, most, expected in ((1000, 46, 46), (1000, 48, 47), (140, 4, 4), (1000, 2, 2), (1000, 1, 2)):
        assert largest(lambda crops: 60 + 20 * crops, budget, 2, step=1, power=1, most=most) == expected


@pytest.mark.parametrize("budget, expected", [(1_000, None), (10_000, 96), (1_048_576 + 1000, 1024)])
def test_the_largest_crop_is_a_multiple_of_eight_pixels(budget, expected):
    assert largest(lambda side: side**2 + 500, budget, 64, step=8, power=2) == expected


def test_the_search_takes_no_giant_step_where_memory_starts_flat():
    """Small crops peak in the optimiser's step, whatever their size."""
    tried = []

    def peak(side):
        tried.append(side)
        return max(10_000, side**2)

    assert largest(peak, 1_048_576, 64, step=8, power=2) == 1024
    assert max(tried) <= 4 * 1024


def test_a_step_takes_the_fastest_plan_that_fits():
    plans = [(90, 1.0), (70, 1.1), (80, 1.2), (10, 1.3)]
    step = PlannedStep({"weights": 50, "images": 10}, gradients=0, optimizer=20, plans=plans)
    assert [step.within(bytes) for bytes in (150, 149, 129, 69)] == [(90, 1.0), (70, 1.1), (10, 1.3), (10, 1.3)]
    assert [step.least(time) for time in (1.0, 1.1, 1.25)] == [150, 130, 130]
    assert step.least() == step.needed(10) == 80  # the optimiser's step
    step = step._replace(gradients=65)
    assert step.least() == 145 and step.budget(150) == 25
