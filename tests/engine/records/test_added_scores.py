"""Scores of a user's own: counted image by image, summed over ranks, beside the usual ones."""

import numpy as np
import pytest
import torch

from engine.process.distributed import World
from engine.records.added_scores import AddedScores
from engine.records.evaluated import Evaluated

EVALUATED = Evaluated(scores={"miou": 0.5}, summary="", images=2, details={"views": {}}, curves={"val/miou": 50.0})


class Agreement:
    """The share of pixels that agree, and the number of images."""

    def __init__(self, name: str = "agreement"):
        self.name, self.counts = name, np.zeros(3, np.int64)

    def add(self, prediction, label):
        assert prediction.shape == label.shape and prediction.dtype == np.uint8
        self.counts += [1, prediction.size, np.count_nonzero(prediction == label)]

    def scores(self):
        images, pixels, same = self.counts
        return {self.name: same / pixels, "images_seen": images}


class OfTwo(World):
    """A rank of two that have counted the same."""

    def sum_(self, tensor):
        return tensor.mul_(2)


def test_scores_are_counted_per_image_and_summed_over_ranks():
    predictions = torch.tensor([[[0, 1], [1, 1]], [[1, 1], [1, 1]]], dtype=torch.uint8)
    for world, images in ((World(), 2), (OfTwo(), 4)):
        added = AddedScores({"mine": Agreement()})
        added.add(predictions, torch.ones_like(predictions))
        evaluated = added.added_to(EVALUATED, world)
        assert evaluated.added == {"agreement": 7 / 8, "images_seen": images}
        assert evaluated.scores == {"miou": 0.5, "agreement": 7 / 8, "images_seen": images}
        assert evaluated.curves == {"val/miou": 50.0, "val/agreement": 7 / 8, "val/images_seen": images}


class Fails(Agreement):
    def add(self, prediction, label):
        raise IndexError("no such class")


class Text(Agreement):
    def scores(self):
        return {"verdict": "good"}


@pytest.mark.parametrize(
    "own, problem",
    [
        (Agreement("miou"), "scores=mine gives miou, which the evaluation has already: rename it"),
        (Agreement("views"), "scores=mine gives views, which the evaluation has already: rename it"),
        (Fails(), "scores=mine: IndexError: no such class"),
        (Text(), "scores=mine: ValueError: could not convert string to float: 'good'"),
    ],
)
def test_a_score_that_fails_or_takes_a_name_is_refused(own, problem):
    added, pixels = AddedScores({"mine": own}), torch.zeros(1, 2, 2, dtype=torch.uint8)
    with pytest.raises(ValueError) as error:
        added.add(pixels, pixels)
        added.added_to(EVALUATED, World())
    assert str(error.value) == problem


def test_a_score_may_take_the_images_names():
    class Named(Agreement):
        takes_name = True

        def add(self, prediction, label, name):
            assert prediction.max() == int(name)
            super().add(prediction, label)

    own, pixels = Named(), torch.arange(2, dtype=torch.uint8).view(2, 1, 1)
    AddedScores({"mine": own, "other": Agreement()}).add(pixels, pixels, ["0", "1"])
    assert own.counts[0] == 2


def test_without_scores_nothing_is_read():
    evaluated = AddedScores({})
    evaluated.add(torch.zeros(1, device="meta"), torch.zeros(1, device="meta"))
    assert evaluated.added_to(EVALUATED, World()) == EVALUATED
