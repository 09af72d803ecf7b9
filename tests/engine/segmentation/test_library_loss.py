"""Losses of segmentation_models_pytorch, and the score `dice`."""

import sys

import numpy as np
import pytest
import torch

from engine.assemble.tasks import loss as loss_of
from engine.assemble.tasks import network_of
from engine.segmentation.dice import DiceScores
from engine.segmentation.library_loss import LibraryLoss
from models.segmentation import upsampled
from tests.runs import SHORT, run_config

KINDS = ("dice", "focal", "jaccard", "lovasz", "tversky")


def pixels(ignored: float = 0.3) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 4, 3, 5, generator=generator, dtype=torch.bfloat16).requires_grad_()
    labels = torch.randint(0, 4, (2, 24, 40), generator=generator, dtype=torch.uint8)
    labels[torch.rand(labels.shape, generator=generator) < ignored] = 255
    return logits, labels


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_library_s_loss_of_the_upsampled_logits_without_ignored_pixels(kind):
    losses = pytest.importorskip("segmentation_models_pytorch").losses
    logits, labels = pixels()
    of_library = getattr(losses, f"{kind.capitalize()}Loss")("multiclass", ignore_index=255)
    expected = of_library(upsampled(logits.float(), (24, 40), 8), labels.long())
    loss = LibraryLoss(255, None, 8, kind, 0.0)(logits, labels)
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-6)
    with_entropy = LibraryLoss(255, None, 8, kind, 0.5)(logits, labels)
    entropy = torch.nn.functional.cross_entropy
    rows = [
        entropy(a[None], b[None], ignore_index=255)
        for a, b in zip(upsampled(logits.float(), (24, 40), 8), labels.long(), strict=True)
    ]
    torch.testing.assert_close(with_entropy, expected + 0.5 * torch.stack(rows).mean(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_micro_batch_without_labels_has_no_loss_and_no_gradient(kind):
    pytest.importorskip("segmentation_models_pytorch")
    logits, labels = pixels(ignored=2)
    loss = LibraryLoss(255, None, 8, kind, 0.5)(logits, labels)
    loss.backward()
    assert loss == 0 and not logits.grad.any()


def test_weights_of_classes_change_a_loss_and_lovasz_and_wrong_ones_are_refused():
    pytest.importorskip("segmentation_models_pytorch")
    logits, labels = pixels()
    for kind in sorted({*KINDS} - {"lovasz"}):
        parts = [LibraryLoss(255, torch.eye(4)[k], 8, kind, 0.0)(logits, labels) for k in range(4)]
        weighted = LibraryLoss(255, torch.tensor([1.0, 2, 0, 1]), 8, kind, 0.0)(logits, labels)
        torch.testing.assert_close(weighted, (parts[0] + 2 * parts[1] + parts[3]) / 4)
    with pytest.raises(ValueError, match="with loss.kind=lovasz, which has none"):
        run_config("loss=library", "loss.kind=lovasz", "loss.class_weights=[1,2]")
    for wrong in ("even", "[]", "[1,-1]", "[0,0]", "[1,a]", "2"):
        with pytest.raises(ValueError, match=r"loss.class_weights=.*: expected none, frequency, or a number for each"):
            run_config(f"loss.class_weights={wrong}")


def test_numbers_of_class_weights_are_compared_with_the_classes_and_a_plan_needs_no_values():
    network = network_of(run_config(*SHORT), 3)
    config = run_config(*SHORT, "loss.class_weights=[1,2.5,1]").loss
    assert loss_of(config, network=network).losses[str(network.stride)].weights.tolist() == [1, 2.5, 1]
    config.class_weights = [1, 2]
    with pytest.raises(ValueError, match=r"loss.class_weights=\[1, 2\] has 2 numbers: expected 3, one for each class"):
        loss_of(config, network=network)
    assert run_config("loss=library").loss.planned.name == "cross_entropy"


def test_without_the_library_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "segmentation_models_pytorch", None)
    monkeypatch.setitem(sys.modules, "segmentation_models_pytorch.losses", None)
    with pytest.raises(ValueError, match="loss=library needs segmentation_models_pytorch .*pip install segm"):
        LibraryLoss(255, None, 8, "dice", 0.0)


def test_dice_is_of_all_images_by_class_and_in_the_mean():
    score = DiceScores(("sky", "road", "sea"), 255)
    for prediction, label in (([0, 0, 1, 1], [0, 1, 1, 255]), ([1, 1], [1, 0])):
        score.add(np.array(prediction, np.uint8), np.array(label, np.uint8))
    scores = score.scores()  # sky: 1 right, 2 predicted, 2 labelled; road: 2 right, 3 predicted, 3 labelled
    assert scores["dice_sky"] == 0.5 and scores["dice_road"] == pytest.approx(2 / 3) and np.isnan(scores["dice_sea"])
    assert scores["dice"] == pytest.approx((0.5 + 2 / 3) / 2)
    assert [*run_config("scores=[dice]").scores] == ["dice"]
