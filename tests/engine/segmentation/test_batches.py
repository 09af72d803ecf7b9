"""Images of one size, or windows of one, at once: equal scores, fewer operators, and fewer where memory runs out."""

import logging
import math

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from datasets import SegmentationDataset, cityscapes
from engine import assemble
from engine.process.console import make_console, progress_bar
from engine.process.distributed import World
from engine.records.evaluated import Evaluated
from engine.segmentation import evaluation
from engine.segmentation.batches import AtOnce, batches_of_equal_size
from engine.segmentation.evaluation import evaluate_split
from engine.segmentation.inference import WHOLE_IMAGE, Views, predict
from models.forward import Forward
from tests import trees
from tests.engine.learners import forward_of
from tests.engine.segmentation.test_inference import SmallBody, pictures, without_head
from tests.runs import run_config

VIEWS = {
    "whole": WHOLE_IMAGE,
    "base": Views(base_size=40),
    "windows": Views(window=16),
    "views": Views(window=32, scales=(1.0, 0.7), flip=True),
}
EVERY_VIEW = pytest.mark.parametrize("views", VIEWS.values(), ids=VIEWS)
SIZES = [(32, 48), (40, 40), (32, 48), (32, 48), (40, 40), (19, 23), *[(32, 48)] * 7]


@pytest.fixture(scope="module")
def streets(tmp_path_factory) -> SegmentationDataset:
    return cityscapes(trees.cityscapes(tmp_path_factory.mktemp("streets")), "train")


@pytest.fixture
def forward(streets) -> Forward:
    torch.manual_seed(0)
    return forward_of(without_head(SmallBody(), len(streets.classes)), std=0.02)


def minibatches(sizes: list[tuple[int, int]]) -> list[dict]:
    generator = torch.Generator().manual_seed(0)
    labels = [torch.randint(0, 19, (1, *size), dtype=torch.uint8, generator=generator) for size in sizes]
    images = [torch.randint(0, 256, (1, 3, *size), dtype=torch.uint8, generator=generator) for size in sizes]
    return [
        {"image": image, "label": label, "name": [str(number)]}
        for number, (image, label) in enumerate(zip(images, labels, strict=True))
    ]


def evaluated(streets, forward: Forward, views: Views, at_once: AtOnce, sizes=SIZES) -> tuple[Evaluated, dict]:
    """The scores, and the predictions by name."""
    predictions_by_name: dict[str, Tensor] = {}

    def note(minibatch: dict, predictions: Tensor) -> None:
        assert not predictions_by_name.keys() & minibatch["name"]
        predictions_by_name.update(zip(minibatch["name"], predictions, strict=True))

    world = World()
    progress = progress_bar(make_console())
    at_once.views = views
    options = {"world": world, "progress": progress, "on_prediction": note, "at_once": at_once}
    return evaluate_split(forward, streets, minibatches(sizes), **options), predictions_by_name


@EVERY_VIEW
def test_scores_and_predictions_are_equal_for_any_batch_size(streets, forward, views):
    expected, ids = evaluated(streets, forward, views, AtOnce(1))
    assert len(torch.cat([prediction.flatten() for prediction in ids.values()]).unique()) > 2
    for at_once in (AtOnce(3), AtOnce(8), AtOnce(pixels=4 * 32 * 48)):
        result, predictions = evaluated(streets, forward, views, at_once)
        assert result.details == expected.details and result.images == len(SIZES)
        assert predictions.keys() == ids.keys() and all(torch.equal(predictions[name], ids[name]) for name in ids)


def test_images_wait_for_others_of_their_size():
    """At most four batches' worth of them. Those without a label are not joined with others."""
    few = minibatches([(8, 8)] * 3 + [(9, 9)] * 4 + [(8, 8)] * 2)
    del few[1]["label"]
    batches = [batch["name"] for batch in batches_of_equal_size(few, lambda _: 4)]
    assert batches == [["3", "4", "5", "6"], ["0", "2", "7", "8"], ["1"]]
    mixed = minibatches([(height, 8) for height in [*range(1, 9), 3, 3]])
    batches = [batch["name"] for batch in batches_of_equal_size(mixed, lambda _: 2)]
    assert batches == [["0"], ["2", "8"], *([name] for name in "1345679")]


class Operators(TorchDispatchMode):
    """Context that counts the operators that launch a kernel on a device."""

    VIEWS = tuple("view split select slice unsqueeze expand permute alias detach empty _unsafe".split())

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += not function.overloadpacket.__name__.startswith(self.VIEWS)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("views", [*list(VIEWS.values())[:2], VIEWS["views"]], ids=["whole", "base", "views"])
def test_eight_images_at_once_take_a_quarter_of_the_operators_or_less(streets, forward, views):
    counts = []
    for at_once in (AtOnce(1), AtOnce(8 * (2 if views.window else 1))):  # two windows side by side
        with Operators() as counted:
            evaluated(streets, forward, views, at_once, [(32, 48)] * 16)
        counts.append(counted.count)
    assert counts[1] <= counts[0] / 4, counts


def test_windows_of_one_size_pass_through_the_network_together(forward):
    """Three windows in each of two rows; the last column is cut by the edge of the image."""
    shapes: list[tuple[int, ...]] = []
    forward.network.register_forward_pre_hook(lambda _, args: shapes.append((*args[0].shape,)))
    images = pictures(24, 34)
    views = Views(window=16, overlap=0.25)
    predictions = []
    for windows, expected in ((1, [(1, 3, 16, 16)] * 2 + [(1, 3, 16, 14)]), (2, [(2, 3, 16, 16), (1, 3, 16, 14)])):
        predictions.append(predict(forward, images, views, windows=windows))
        assert shapes == expected * 2
        shapes.clear()
    assert torch.equal(*predictions)


class Limited:
    """`evaluation.predict` on a device whose memory holds few images; some pixels are counted before it runs out."""

    def __init__(self, most: int):
        self.most = most
        self.tried = []

    def __call__(
        self, forward: Forward, images: Tensor, views: Views, *, unscored: Tensor, windows: int, **options
    ) -> Tensor:
        self.tried.append(len(images) * windows)
        unscored += 1
        if self.tried[-1] > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        unscored -= 1
        return predict(forward, images, views, unscored=unscored, windows=windows, **options)


@pytest.mark.parametrize("at_once", [AtOnce(8), AtOnce(pixels=8 * 32 * 48)], ids=["images", "pixels"])
def test_out_of_memory_halves_the_batch_and_loses_nothing(streets, forward, at_once, monkeypatch, caplog):
    expected, ids = evaluated(streets, forward, WHOLE_IMAGE, AtOnce(1))
    limited = Limited(2)
    monkeypatch.setattr(evaluation, "predict", limited)
    monkeypatch.setattr("engine.segmentation.batches.logger", logging.getLogger("seen"))
    result, predictions = evaluated(streets, forward, WHOLE_IMAGE, at_once)
    assert result.details == expected.details and all(torch.equal(predictions[name], ids[name]) for name in ids)
    assert [record.getMessage() for record in caplog.records if record.name == "seen"] == [
        "out of memory with 8 images or windows of 32x48 pixels at once: 2 from now on"
    ]
    assert limited.tried[:3] == [8, 4, 2] and max(limited.tried[3:]) == 2
    evaluated(streets, forward, WHOLE_IMAGE, at_once)
    assert max(limited.tried[3:]) == 2  # the next evaluation of a run
    assert len([record for record in caplog.records if record.name == "seen"]) == 1

    limited.tried.clear()
    evaluated(streets, forward, VIEWS["windows"], AtOnce(8), [(32, 48)] * 4)
    assert limited.tried[:3] == [8, 4, 2] and max(limited.tried[3:]) == 2

    limited.most = 0
    with pytest.raises(torch.OutOfMemoryError):
        evaluated(streets, forward, WHOLE_IMAGE, at_once)
    assert limited.tried[-1] == 1


def test_a_batch_has_the_pixels_of_a_micro_batch(forward):
    words = ("data.crop_size=64", "data.crop_aspect=2", "data.crops_per_minibatch=12", "trainer.accumulation_steps=2")
    config = run_config(*words)
    cuda = torch.device("cuda")
    pixels = 3 * 64 * 128  # of three crops on each of two devices
    for size, views, expected in (
        ((64, 128), WHOLE_IMAGE, (3, 1)),
        ((64, 65), WHOLE_IMAGE, (5, 1)),
        ((640, 128), WHOLE_IMAGE, (1, 1)),
        ((640, 128), Views(base_size=160), (4, 1)),
        ((64, 128), Views(scales=(0.5, 1.7)), (1, 1)),
        ((64, 512), Views(window=64, overlap=0), (1, 6)),
        ((64, 256), Views(window=64, overlap=0), (1, 4)),
        ((64, 128), Views(window=64, overlap=0), (3, 2)),
        ((64, 128), Views(window=128), (3, 1)),
    ):
        at_once = assemble.at_once(config, cuda, process_count=2, views=views)
        assert at_once.counts_per_pass(forward, size) == expected, (size, views)
        assert at_once.pixels == pixels
    many = AtOnce(pixels=2**40)
    assert many.counts_per_pass(forward, (64, 128))[0] == 2**28 // 19 // math.prod((64, 128))
    assert assemble.at_once(config, torch.device("cpu"), 2).counts_per_pass(forward, (8, 8)) == (1, 1)
    config.trainer.evaluate_batch_size = 7
    seven = AtOnce(7, views=Views(config.data.base_size, config.data.antialias))
    assert assemble.at_once(config, torch.device("cpu"), 2) == assemble.at_once(config, cuda, 2) == seven
