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
        evaluated = added.sum_and_add_to(EVALUATED, world)
        assert evaluated.added == {"agreement": 7 / 8, "images_seen": images}
        assert evaluated.scores == {"miou": 0.5, "agreement": 7 / 8, "images_seen": images}
        assert evaluated.curves == {"val/miou": 50.0, "val/agreement": 7 / 8, "val/images_seen": images}


class Fails(Agreement):
    def __init__(self, error: BaseException):
        super().__init__()
        self.error = error

    def add(self, prediction, label):
        raise self.error


class Text(Agreement):
    def scores(self):
        return {"verdict": "good"}


@pytest.mark.parametrize(
    "score, problem",
    [
        (Agreement(3), "scores=mine: TypeError: scores() names one 3: expected a text"),
        (Agreement("miou"), "scores=mine gives miou, which the evaluation has already: rename it"),
        (Agreement("views"), "scores=mine gives views, which the evaluation has already: rename it"),
        (Fails(IndexError("no such class")), "scores=mine: IndexError: no such class"),
        (Fails(SystemExit(0)), "scores=mine: SystemExit: 0"),
        (Text(), "scores=mine: ValueError: could not convert string to float: 'good'"),
    ],
)
def test_a_score_that_fails_or_takes_a_name_is_refused(score, problem):
    added, pixels = AddedScores({"mine": score}), torch.zeros(1, 2, 2, dtype=torch.uint8)
    with pytest.raises(ValueError) as error:
        added.add(pixels, pixels)
        added.sum_and_add_to(EVALUATED, World())
    assert str(error.value) == problem


def test_a_score_may_take_the_images_names():
    class Named(Agreement):
        takes_name = True

        def add(self, prediction, label, name):
            assert prediction.max() == int(name)
            super().add(prediction, label)

    score, pixels = Named(), torch.arange(2, dtype=torch.uint8).view(2, 1, 1)
    AddedScores({"mine": score, "other": Agreement()}).add(pixels, pixels, ["0", "1"])
    assert score.counts[0] == 2


class Writes(Agreement):
    """It writes into what it was given."""

    def add(self, prediction, label):
        torch.from_numpy(prediction).fill_(7)
        label[:] = 7
        super().add(prediction, label)


def test_a_score_cannot_change_what_others_and_the_evaluation_see():
    pixels, score = torch.zeros(1, 2, 2, dtype=torch.uint8), Agreement()
    writes = Writes("writes")
    AddedScores({"writes": writes, "mine": score}).add(pixels, pixels)
    assert not pixels.any() and score.counts.tolist() == writes.counts.tolist() == [1, 4, 4]


class Confidence:
    """The sum of the probabilities of the labels, and the number of pixels, in a tensor on the device."""

    reads = "probabilities"

    def __init__(self):
        self.counts = torch.zeros(2, dtype=torch.float64)

    def add(self, probabilities, label):
        self.counts += torch.stack([probabilities.gather(0, label.long()[None]).sum(), torch.tensor(label.numel())])
        probabilities.zero_()
        label.zero_()

    def scores(self):
        return {"confidence": self.counts[0].float() / self.counts[1]}


def test_a_score_may_read_the_probabilities_of_each_image():
    probabilities, labels = torch.tensor([0.25, 0.75]).view(1, 2, 1, 1).expand(2, 2, 1, 3), torch.ones(2, 1, 3).byte()
    added = AddedScores({"mine": Confidence(), "other": Agreement()})
    added.add(labels, labels)
    added.add_probabilities(probabilities, labels)
    with pytest.raises(MemoryError), added.undone_after_errors():
        added.add_probabilities(1 - probabilities, labels)
        raise MemoryError
    assert added.sum_and_add_to(EVALUATED, OfTwo()).added == {"confidence": 0.75, "agreement": 1.0, "images_seen": 4}
    assert labels.all() and (probabilities > 0).all()


def test_what_a_score_reads_is_known():
    score = Confidence()
    score.reads = "logits"
    with pytest.raises(ValueError, match="^scores=mine has reads='logits': expected 'probabilities', or leave it out$"):
        AddedScores({"mine": score})
