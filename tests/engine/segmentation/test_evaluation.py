"""An evaluation: it never waits for the device, and scores stay the same.

And the table of scores that users read.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from datasets import SegmentationDataset, WholeImages, cityscapes
from datasets.workers import Loader
from engine.process.console import make_console, progress_bar
from engine.process.distributed import World
from engine.process.stopping import StopRequest, UntilStopped
from engine.records.added_scores import NOTHING_ADDED, AddedScores
from engine.records.evaluated import Evaluated
from engine.segmentation.batches import AtOnce
from engine.segmentation.evaluation import evaluate_split, written_predictions
from engine.segmentation.inference import WHOLE_IMAGE, Views
from engine.segmentation.pictures import PictureCollector, overlay
from models.forward import Forward
from tests import trees
from tests.cuda import NEEDS_CUDA
from tests.engine.learners import forward_of
from tests.engine.segmentation.test_inference import SmallBody, without_head
from tests.host_reads import host_reads

SEVERAL_VIEWS = Views(base_size=30, window=16, scales=(1.0, 0.7), flip=True)


def evaluated(
    dataset: SegmentationDataset,
    forward: Forward,
    images: int,
    on_prediction: Callable[[dict, Tensor], None],
    views: Views = WHOLE_IMAGE,
    device: str = "cpu",
    at_once: int = 1,
    added: AddedScores = NOTHING_ADDED,
) -> Evaluated:
    """Evaluate the first `images` images as runs do."""
    world = World(device=torch.device(device))
    loader = Loader(WholeImages(dataset), 0, sampler=range(images), batch_size=1, pin_memory=device == "cuda")
    return evaluate_split(
        forward,
        dataset,
        UntilStopped(loader, StopRequest(), world),
        world=world,
        progress=progress_bar(make_console()),
        on_prediction=on_prediction,
        at_once=AtOnce(at_once, views=views),
        added=added,
    )


def forward_for(dataset: SegmentationDataset) -> Forward:
    torch.manual_seed(0)
    return forward_of(without_head(SmallBody(), len(dataset.classes)), std=0.02)  # predicts several classes


@pytest.fixture
def streets(tmp_path) -> SegmentationDataset:
    return cityscapes(trees.cityscapes(tmp_path), "train")


@pytest.mark.parametrize("at_once", [1, 2])
@pytest.mark.parametrize("views", [WHOLE_IMAGE, SEVERAL_VIEWS], ids=["whole", "views"])
def test_the_host_waits_for_no_image(streets, views, at_once, tmp_path):
    """Two images are shown, all are written; the scores are read at the end, as often for four images as for two."""
    counts = []
    forward = forward_for(streets)
    for images in (2, 4):
        folders = (tmp_path / f"{images}", tmp_path / f"overlays {images}")
        until_the_last = []
        shown = PictureCollector(streets, 2)

        def seen(minibatch: dict, predictions: Tensor, shown=shown, ends=until_the_last) -> None:
            shown(minibatch, predictions)
            write(minibatch, predictions)
            ends.append(len(reads))

        with host_reads() as reads, written_predictions(streets, World(), *map(str, folders), None) as write:
            result = evaluated(streets, forward, images, seen, views, at_once=at_once)
        assert until_the_last[0] == until_the_last[-1]  # what comes before the first prediction comes once
        assert sum("add_up: Tensor.cpu" in read for read in reads) == 1
        assert result.images == images and len(shown.pictures()) == 2
        assert [len([*folder.rglob("*.png")]) for folder in folders] == [images, images]
        counts.append(len(reads))
    assert counts[0] == counts[1]


def test_pictures_for_tensorboard_are_small_and_their_classes_keep_their_colours(streets):
    """12 megapixels took 13 s and 31 MiB."""
    size = 750, 1500
    label = torch.arange(6, dtype=torch.uint8).repeat_interleave(250).expand(size)
    minibatch = {
        "image": torch.zeros(1, 3, *size, dtype=torch.uint8),
        "label": label[None],
        "name": [streets.files[0].name],
    }
    shown = PictureCollector(streets, 1)
    shown(minibatch, label[None] // 2)
    [picture] = shown.pictures().values()
    assert picture.shape == (512, 3 * 1024, 3) and not picture[:, :1024].any()
    for part, count in ((picture[:, 1024:2048], 6), (picture[:, 2048:], 3)):
        expected = overlay(
            np.zeros((1, count, 3), np.uint8), streets.table.colour(np.arange(count, dtype=np.uint8)[None])
        )
        assert np.array_equal(np.unique(part.reshape(-1, 3), axis=0), np.unique(expected.reshape(-1, 3), axis=0))


@pytest.mark.parametrize("views", [WHOLE_IMAGE, SEVERAL_VIEWS], ids=["whole", "views"])
def test_pixels_without_a_finite_score_are_counted_and_end_the_evaluation(streets, views):
    """float16 ends at 65,504. Where all logits overflow, the first class would win."""
    network = without_head(SmallBody(), len(streets.classes))
    network.cls.bias.data[3] = 1e5
    message = r"([\d,]+) of ([\d,]+) pixels have no finite score; precision=float16 overflows: use bfloat16 or float32"
    with pytest.raises(FloatingPointError, match=message) as error:
        evaluated(streets, forward_of(network, "float16"), 2, lambda *_: None, views)
    unscored, total = re.search(message, str(error.value)).groups()
    assert unscored == total  # of the size at which the network sees the images
    assert evaluated(streets, forward_of(network, "bfloat16"), 2, lambda *_: None, views).images == 2


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=NEEDS_CUDA)])
@pytest.mark.parametrize("views", [WHOLE_IMAGE, SEVERAL_VIEWS], ids=["whole", "views"])
@pytest.mark.parametrize("deterministic, at_once", [(False, 1), (True, 1), (False, 2)])
def test_a_gpu_waits_for_no_image(streets, views, deterministic, at_once, device):
    """PyTorch's own check finds no wait, also with deterministic algorithms; the scores equal the CPU's."""
    forward = forward_for(streets)
    expected = evaluated(streets, forward, 4, PictureCollector(streets, 2), views)
    forward.network.to(device)
    forward = replace(forward, mean=forward.mean.to(device), std=forward.std.to(device))
    shown = PictureCollector(streets, 4)
    seen = []

    def watched(minibatch: dict, predictions: Tensor) -> None:
        """From the first to the last prediction, PyTorch raises an error where the host waits for the device."""
        shown(minibatch, predictions)
        seen.append(minibatch["name"])
        torch.cuda.set_sync_debug_mode("error" if len(sum(seen, [])) < 4 else "default")

    torch.use_deterministic_algorithms(deterministic, warn_only=True)  # interpolation has no deterministic version
    try:
        result = evaluated(streets, forward, 4, watched, views, device=device, at_once=at_once)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.use_deterministic_algorithms(False)
    assert len(sum(seen, [])) == 4 and len(shown.pictures()) == 4
    assert result.scores["miou"] == pytest.approx(expected.scores["miou"], abs=0.02)  # a few pixels may round otherwise
    rows = [torch.tensor(evaluation.details["confusion_matrix"]).sum(dim=1) for evaluation in (result, expected)]
    assert torch.equal(*rows)


def test_scores_of_images_need_labels(tmp_path):
    unlabelled = SimpleNamespace(has_labels=False, split="test", name="streets", classes=["a"])
    file = tmp_path / "a.csv"
    with pytest.raises(ValueError, match=f"^per_image={file}: split test of streets has no labels$"):
        with written_predictions(unlabelled, World(), None, None, str(file)):
            pass


class Calibration:
    """The expected calibration error in ten bins (Guo et al., 2017), counted on the device."""

    reads = "probabilities"

    def __init__(self):
        self.counts = torch.zeros(3, 10, dtype=torch.float64)  # of each bin: pixels, right ones, summed confidences

    def add(self, probabilities, label):
        confidence, prediction = (values[label != 255] for values in probabilities.max(dim=0))
        right = prediction == label[label != 255]
        bins = (confidence * 10).long().clamp(max=9)
        for row, values in zip(self.counts, (torch.ones_like(confidence), right, confidence), strict=True):
            row.index_add_(0, bins, values.double())

    def scores(self):
        pixels, right, confidence = self.counts
        return {"ece": abs(right - confidence).sum() / pixels.sum(), "pixels": pixels.sum()}


@pytest.mark.parametrize("views", [WHOLE_IMAGE, SEVERAL_VIEWS], ids=["whole", "views"])
def test_a_score_of_probabilities_sees_each_image_once_though_memory_runs_out(streets, views, monkeypatch):
    forward = forward_for(streets)
    usual = evaluated(streets, forward, 4, lambda *_: None, views)
    expected = evaluated(streets, forward, 4, lambda *_: None, views, added=AddedScores({"ece": Calibration()}))
    assert {**expected.scores, **usual.scores} == expected.scores and 0 < expected.scores["ece"] < 1
    assert expected.scores["pixels"] == torch.tensor(usual.details["confusion_matrix"]).sum()

    add = AddedScores.add_probabilities
    tries = []

    def no_memory(self: AddedScores, probabilities: Tensor, *arguments: object) -> None:
        add(self, probabilities, *arguments)
        if len(tries) < 2 and len(probabilities) > 1:
            tries.append(probabilities)
            raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(AddedScores, "add_probabilities", no_memory)
    added = AddedScores({"ece": Calibration()})
    again = evaluated(streets, forward, 4, lambda *_: None, views, at_once=8, added=added)
    assert tries and again.scores["pixels"] == expected.scores["pixels"]
    assert again.scores["ece"] == pytest.approx(expected.scores["ece"])
