"""Scores of a network on a whole split, with a progress bar, and what is made of the predictions on the way."""

from collections.abc import Callable, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure
from rich.progress import Progress
from torch import Tensor, nn
from torch.utils.data import DataLoader

from datasets import SegmentationDataset
from engine.distributed import World
from engine.image_input import Autocast, ImageInput
from engine.inference import WHOLE_IMAGE, Views, predict
from engine.layer_health import Extreme, corner_crops, layer_health
from engine.learner import Learner, renew_statistics
from engine.memory import reset_peak_memory
from engine.metrics import Counts, all_scores
from engine.pictures import comparison, confusion_picture, inside, write_png
from engine.reporting import tracked
from engine.stopping import StopRequest, UntilStopped


def evaluate_dataset(
    network: nn.Module,
    dataset: SegmentationDataset,
    loader: DataLoader,
    *,
    world: World,
    progress: Progress,
    image_input: ImageInput,
    autocast: Autocast,
    on_prediction: Callable[[dict, Tensor], None],
    views: Views = WHOLE_IMAGE,
) -> tuple[dict, Tensor]:
    """Scores as `all_scores` gives them, and the confusion matrix int64 (K, K) of the K trained classes.

    Args:
        loader: reads whole images of `dataset`, of any sizes: those that this process of `world` evaluates. Scores and
            matrix are of the images of all processes. Those without labels are predicted and not counted.
        on_prediction: sees every (minibatch, predictions), the latter uint8 (N, H, W) on the CPU.

    Raises:
        MemoryError: as of `predict`.
    """
    counts = Counts(dataset.table)
    for minibatch in tracked(progress, loader, f"evaluating {dataset.name} {dataset.split}"):
        predictions = predict(network, minibatch["image"], image_input=image_input, autocast=autocast, views=views)
        if "label" in minibatch:
            counts.add(predictions, minibatch)
        on_prediction(minibatch, predictions.cpu())
    for tensor in counts.tensors():
        world.sum_(tensor)
    trained = len(dataset.classes)
    return all_scores(counts, dataset.table, dataset.has_instances), counts.confusion[:trained, :trained]


class Validated(NamedTuple):
    """What an evaluation finds in the middle or at the end of a training."""

    scores: dict  # of `all_scores`
    confusion: Tensor  # int64 (K, K)
    pictures: dict[str, np.ndarray]  # {name: uint8 (H, 3 W, 3)}
    layers: dict[str, Extreme]  # of `layer_health`, in the first process alone

    def confusion_picture(self, dataset: SegmentationDataset) -> Figure:
        """The confusion matrix of this evaluation of `dataset`, as `engine.pictures.confusion_picture`."""
        return confusion_picture(self.confusion.numpy(), dataset.classes, f"{dataset.name} {dataset.split}")


@dataclass
class Validation:
    """The evaluations of a training run, in each of its processes.

    Args:
        dataset: whose images `loader` reads, those of this process of `world`.
        statistics_crops: minibatches from which averaged weights get statistics of their own; none keeps those of the
            trained network.
        stop: ends an evaluation with `Preempted`.
        pictures: number of images that are kept for people to look at.
        crop_size: pixels of a side of the crops that the norm layers are measured on.
    """

    learner: Learner
    dataset: SegmentationDataset
    loader: DataLoader
    statistics_crops: Sized
    stop: StopRequest
    world: World
    image_input: ImageInput
    autocast: Autocast
    pictures: int
    crop_size: int

    def prepare(self) -> None:
        """Give what is evaluated its running statistics, the same in every process."""
        if len(self.statistics_crops) > 0:
            images = (self.image_input(crop["image"]) for crop in self.statistics_crops)
            renew_statistics(self.learner.evaluated, images, self.autocast, self.world)
        self.world.share_buffers(self.learner.evaluated)

    def run(self, progress: Progress) -> Validated:
        """Evaluate the network as it is now. Raises MemoryError, as `evaluate_dataset`, and Preempted."""
        collector = PictureCollector(self.dataset, self.pictures)
        scores, confusion = evaluate_dataset(
            self.learner.evaluated,
            self.dataset,
            UntilStopped(self.loader, self.stop, self.world),
            world=self.world,
            progress=progress,
            image_input=self.image_input,
            autocast=self.autocast,
            on_prediction=collector,
        )
        pictures = {name: picture for shard in self.world.gather(collector.pictures) for name, picture in shard.items()}
        layers = {}
        if self.world.first:
            crops = corner_crops(self.loader.dataset[0]["image"], self.crop_size)  # always the same
            layers = layer_health(self.learner.network, self.image_input(crops), self.autocast)
        reset_peak_memory(self.world.device)  # whole images may need more than the crops of the training
        return Validated(scores, confusion, pictures, layers)


class PictureCollector:
    """`on_prediction` that keeps comparisons of the split's first `count` images, {name: uint8 (H, 3 W, 3)}."""

    def __init__(self, dataset: SegmentationDataset, count: int):
        self.dataset = dataset
        self.count = count
        self.pictures: dict[str, np.ndarray] = {}

    def __call__(self, minibatch: dict, predictions: Tensor) -> None:
        if int(minibatch["index"][0]) < self.count:
            self.pictures[minibatch["name"][0]] = _comparison(self.dataset, minibatch, predictions)


class PredictionWriter:
    """`on_prediction` that writes files.

    Args:
        predictions: folder for one PNG per image in the dataset's official encoding; None writes none.
        overlays: folder for pictures image | ground truth | prediction; None writes none.
        overlay_images: number of overlays, of the split's first images; None is all.
    """

    def __init__(
        self,
        dataset: SegmentationDataset,
        predictions: Path | None,
        overlays: Path | None,
        overlay_images: int | None,
    ):
        self.dataset = dataset
        self.predictions = predictions
        self.overlays = overlays
        self.overlay_images = len(dataset) if overlay_images is None else overlay_images

    def __call__(self, minibatch: dict, predictions: Tensor) -> None:
        name = self.dataset.prediction_filename(minibatch["name"][0])
        if self.predictions is not None:
            encoded = self.dataset.encode_prediction(predictions[0].numpy())
            write_png(inside(self.predictions, name), encoded, self.dataset.prediction_palette)
        if self.overlays is not None and int(minibatch["index"][0]) < self.overlay_images:
            write_png(inside(self.overlays, name), _comparison(self.dataset, minibatch, predictions))


def _comparison(dataset: SegmentationDataset, minibatch: dict, predictions: Tensor) -> np.ndarray:
    """Of a minibatch of one image, with predictions uint8 (1, H, W)."""
    image = minibatch["image"][0].permute(1, 2, 0).numpy()  # (H, W, 3)
    label = minibatch["label"][0].numpy() if "label" in minibatch else None
    if label is not None:  # without the classes that only scores see
        label = np.where(label < len(dataset.classes), label, dataset.ignore_index).astype(np.uint8)
    return comparison(image, label, predictions[0].numpy(), dataset)
