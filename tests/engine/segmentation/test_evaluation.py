"""An evaluation: it never waits for the device, images of equal size share a minibatch, scores stay the same.

And the table of scores that users read.
"""

import io
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import Tensor

from datasets import SegmentationDataset, WholeImages, camvid, cityscapes
from datasets.workers import Loader
from engine.process.console import make_console, progress_bar
from engine.process.distributed import World
from engine.process.forward import Forward
from engine.process.stopping import StopRequest, UntilStopped
from engine.records.evaluated import Evaluated
from engine.segmentation.evaluation import corner_crops, equal_sizes, evaluate_split, iou_table
from engine.segmentation.inference import WHOLE_IMAGE, Views
from engine.segmentation.predictions import PictureCollector, PredictionWriter
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
    batch_size: int = 1,
    device: str = "cpu",
) -> Evaluated:
    """Evaluate the first `images` images as runs do."""
    world = World(device=torch.device(device))
    loader = Loader(WholeImages(dataset), 0, sampler=range(images), batch_size=1, pin_memory=device == "cuda")
    return evaluate_split(
        forward,
        dataset,
        UntilStopped(loader, StopRequest(), world),
        batch_size=batch_size,
        views=views,
        world=world,
        progress=progress_bar(make_console()),
        memory_advice="",
        on_prediction=on_prediction,
    )


def forward_for(dataset: SegmentationDataset) -> Forward:
    torch.manual_seed(0)
    return forward_of(without_head(SmallBody(), len(dataset.classes)), std=0.02)  # predicts several classes


@pytest.fixture
def streets(tmp_path) -> SegmentationDataset:
    return cityscapes(trees.cityscapes(tmp_path), "train")


@pytest.mark.parametrize("views, batch_size", [(WHOLE_IMAGE, 2), (SEVERAL_VIEWS, 1)], ids=["whole", "views"])
def test_the_host_waits_for_no_image(streets, views, batch_size):
    """Two images are shown, none is written; the scores are read at the end, as often for four images as for two."""
    counts, forward = [], forward_for(streets)
    for images in (2, 4):
        shown, nothing = PictureCollector(streets, 2), PredictionWriter(streets, None, None)
        until_the_last = []

        def seen(minibatch: dict, predictions: Tensor, consumers=(shown, nothing), ends=until_the_last) -> None:
            for consumer in consumers:
                consumer(minibatch, predictions)
            ends.append(len(reads))

        with host_reads() as reads:
            result = evaluated(streets, forward, images, seen, views, batch_size)
        assert until_the_last[0] == until_the_last[-1]  # what comes before the first prediction comes once
        assert sum("add_up: Tensor.cpu" in read for read in reads) == 2  # pixels and instances
        assert result.images == images and len(shown.pictures()) == 2
        counts.append(len(reads))
    assert counts[0] == counts[1]


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=NEEDS_CUDA)])
@pytest.mark.parametrize("views", [WHOLE_IMAGE, SEVERAL_VIEWS], ids=["whole", "views"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_gpu_waits_for_no_image(streets, views, deterministic, device):
    """PyTorch's own check, and the scores of the CPU; with the scores' counting on deterministic algorithms too."""
    forward = forward_for(streets)
    expected = evaluated(streets, forward, 4, PictureCollector(streets, 2), views)
    forward.network.to(device)
    forward = replace(forward, mean=forward.mean.to(device), std=forward.std.to(device))
    shown, seen = PictureCollector(streets, 4), []

    def watched(minibatch: dict, predictions: Tensor) -> None:
        """From the first to the last prediction, PyTorch raises an error where the host waits for the device."""
        shown(minibatch, predictions)
        seen.append(minibatch["name"])
        torch.cuda.set_sync_debug_mode("error" if len(seen) < 4 else "default")

    torch.use_deterministic_algorithms(deterministic, warn_only=True)  # interpolation has no deterministic version
    try:
        result = evaluated(streets, forward, 4, watched, views, device=device)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.use_deterministic_algorithms(False)
    assert len(seen) == 4 and len(shown.pictures()) == 4
    assert result.scores["miou"] == pytest.approx(expected.scores["miou"], abs=0.02)  # a few pixels may round otherwise
    rows = [torch.tensor(each.details["confusion_matrix"]).sum(dim=1) for each in (result, expected)]
    assert torch.equal(*rows)


def mixed_sizes(root: Path) -> SegmentationDataset:
    """Seven images in the sizes A A A B A B B."""
    for index, size in enumerate([(24, 40)] * 3 + [(32, 28), (24, 40), (32, 28), (32, 28)]):
        image, label = trees.pair(index, list(range(12)), size)
        trees.write(root / "val" / "images" / f"{index}.png", image)
        trees.write(root / "val" / "labels" / f"{index}.png", label)
    return camvid(root, "val")


@pytest.mark.parametrize(
    "views, batch_size, sizes",
    [(WHOLE_IMAGE, 2, [2, 1, 1, 1, 2]), (WHOLE_IMAGE, 9, [3, 1, 1, 2]), (SEVERAL_VIEWS, 2, [2, 1, 1, 1, 2])],
)
def test_images_of_equal_size_are_predicted_at_once(tmp_path, views, batch_size, sizes):
    """In float64, where no two classes tie: the same pixels as one image at a time, in the same order."""
    dataset = mixed_sizes(tmp_path)
    forward = forward_for(dataset)
    forward.network.double()
    forward = replace(forward, mean=forward.mean.double(), std=forward.std.double())
    calls: list[int] = []
    forward.network.register_forward_pre_hook(lambda _, arguments: calls.append(len(arguments[0])))
    alone, together = [], []

    def keep(into: list) -> Callable[[dict, Tensor], None]:
        return lambda minibatch, predictions: into.extend(zip(minibatch["name"], predictions, strict=True))

    expected = evaluated(dataset, forward, 7, keep(alone), views)
    calls.clear()
    result = evaluated(dataset, forward, 7, keep(together), views, batch_size)
    assert calls == sizes if views is WHOLE_IMAGE else list(dict.fromkeys(calls)) == list(dict.fromkeys(sizes))
    assert [name for name, _ in together] == [name for name, _ in alone] == [str(index) for index in range(7)]
    assert all(torch.equal(ours, theirs) for (_, ours), (_, theirs) in zip(together, alone, strict=True))
    assert result.scores == expected.scores and result.details == expected.details
    assert len(set(torch.cat([prediction.flatten() for _, prediction in alone]).tolist())) > 2


def test_instances_are_counted_per_image_in_a_minibatch_too(streets):
    forward, ignored = forward_for(streets), PictureCollector(streets, 0)
    alone, together = (evaluated(streets, forward, 4, ignored, batch_size=size) for size in (1, 4))
    assert together.scores == alone.scores and alone.scores["official"]["mean_iiou"] > 0


def test_a_batch_of_equal_sizes_is_joined_before_another_image_is_read():
    """Images with and without a label are apart."""
    read = []

    def images():
        for number in range(5):
            read.append(number)
            label = {"label": torch.zeros(1, 2, 2)} if number == 4 else {}
            yield {"image": torch.zeros(1, 3, 2, 2), "name": [str(number)], **label}

    found = [(minibatch["name"], len(minibatch["image"]), len(read)) for minibatch in equal_sizes(images(), 2)]
    assert found == [(["0", "1"], 2, 2), (["2", "3"], 2, 4), (["4"], 1, 5)]


def test_the_crops_are_within_the_image():
    image = torch.arange(3 * 6 * 9).view(3, 6, 9)
    first, second = corner_crops(image, 4, 4)
    assert torch.equal(first, image[:, :4, :4]) and torch.equal(second, image[:, 2:, 5:])
    assert torch.equal(corner_crops(image, 7, 7)[1], image[:, :, 2:])


def table_lines(scores: dict) -> list[list[str]]:
    """The words of each line of the table, without its frame."""
    console = Console(file=io.StringIO(), width=80)
    console.print(iou_table(scores))
    lines = console.file.getvalue().splitlines()
    return [words for line in lines if (words := [cell.strip() for cell in re.split("[│┃]", line) if cell.strip()])]


def test_official_scores_stand_beside_the_papers():
    paper = {"miou": 0.5, "iou": {"road": 0.5, "car": None}, "pixel_accuracy": 0.75}
    lines = table_lines({**paper, "official": {}})
    assert ["class", "IoU %"] in lines and ["mean (mIoU)", "50.00"] in lines and ["car", "–"] in lines
    lines = table_lines({**paper, "official": {"miou": 0.25, "iou": {"road": 0.25, "car": 0.5, "other": 0.0}}})
    assert ["class", "IoU %", "official %"] in lines and ["mean (mIoU)", "50.00", "25.00"] in lines
    assert ["car", "–", "50.00"] in lines and ["other", "0.00"] in lines
    official = {"miou": 0.5, "iiou": {"car": 0.125}, "mean_iiou": 0.125, "mean_category_iou": 0.5}
    official |= {"category_iou": {"flat": 0.5, "vehicle": None}, "category_iiou": {"vehicle": 0.2}}
    official["mean_category_iiou"] = 0.2
    lines = table_lines({**paper, "official": official})
    assert ["mean (mIoU)", "50.00", "12.50"] in lines and ["car", "–", "12.50"] in lines
    assert ["flat", "50.00"] in lines and ["vehicle", "–", "20.00"] in lines
    assert not any("instanceIds" in line[0] for line in lines)
    lines = table_lines({**paper, "official": {**official, "iiou": {"car": None}, "mean_iiou": None}})
    assert ["class", "IoU %"] in lines and ["mean (mIoU)", "50.00"] in lines and ["flat", "50.00"] in lines
    assert any("instanceIds" in line[0] for line in lines)
