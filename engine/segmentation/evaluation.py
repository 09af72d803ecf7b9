"""Scores of a segmentation network on a whole split, with a progress bar."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from rich.progress import Progress
from torch import Tensor
from torch.utils.data import DataLoader

from datasets import SegmentationDataset
from engine.console import tracked
from engine.distributed import World
from engine.evaluated import Evaluated
from engine.forward import Forward
from engine.run import Run
from engine.schema.evaluation import MEMORY_ADVICE
from engine.schema.segmentation import SegmentationRun
from engine.segmentation.inference import Views, predict
from engine.segmentation.pictures import confusion_picture
from engine.segmentation.predictions import PictureCollector
from engine.segmentation.score_table import iou_table
from engine.segmentation.scores import Counts, all_scores
from engine.stopping import UntilStopped
from models.layers import layer_health


def evaluate_split(
    forward: Forward,
    dataset: SegmentationDataset,
    minibatches: DataLoader | UntilStopped,
    *,
    views: Views,
    world: World,
    progress: Progress,
    on_prediction: Callable[[dict, Tensor], None],
) -> Evaluated:
    """Evaluate a split with `all_scores`. Details: the views, and the confusion matrix (K, K) of the K trained classes.

    Args:
        minibatches: this rank's share of `dataset`, whole images of any size. Scores are over the images of all ranks.
            Images without labels are predicted but not counted.
        on_prediction: called with every minibatch and its predictions, uint8 (N, H, W) on the CPU.

    Raises:
        MemoryError: see `predict`.
    """
    counts, images = Counts(dataset.table), 0
    for minibatch in tracked(progress, minibatches, f"evaluating {dataset.name} {dataset.split}"):
        predictions = predict(forward, minibatch["image"], views, MEMORY_ADVICE)
        if "label" in minibatch:
            counts.add(predictions, minibatch)
        images += len(predictions)
        on_prediction(minibatch, predictions.cpu())
    for tensor in counts.tensors():
        world.sum_(tensor)
    trained, scores = len(dataset.classes), all_scores(counts, dataset.table, dataset.has_instances)
    confusion = counts.confusion[:trained, :trained]
    ious = {f"val_iou/{name}": iou for name, iou in scores["iou"].items() if iou is not None}
    return Evaluated(
        scores=scores,
        summary=f"mIoU {scores['miou']:.4f}  pixel accuracy {scores['pixel_accuracy']:.4f}",
        images=sum(world.gather(images)),
        details={"confusion_matrix": confusion.tolist(), "views": views.record()},
        curves={"val/miou": scores["miou"], "val/pixel_accuracy": scores["pixel_accuracy"], **ious},
        table=partial(iou_table, scores),
        confusion=partial(confusion_picture, confusion.numpy(), dataset.classes, f"{dataset.name} {dataset.split}"),
    )


def evaluation_of(run: Run[SegmentationRun, SegmentationDataset], loader: DataLoader) -> Callable[[], Evaluated]:
    """Return a function that evaluates the current network of `run` on `loader`, this rank's share of the images.

    It also measures the norm layers on two crops of the first image. It raises MemoryError (see `predict`) and
    Preempted.
    """
    data, pictures, dataset = run.config.data, run.config.trainer.pictures, run.val_set

    def evaluate() -> Evaluated:
        network = run.learner.network
        collector = PictureCollector(dataset, pictures)
        evaluated = evaluate_split(
            run.learner.evaluated,
            dataset,
            UntilStopped(loader, run.stop, run.world),
            views=Views(data.base_size, data.antialias),
            world=run.world,
            progress=run.metrics.progress,
            on_prediction=collector,
        )
        shown = {
            f"image_label_prediction/{name}": picture
            for share in run.world.gather(collector.pictures)
            for name, picture in share.items()
        }
        layers = {}
        if run.world.first:
            crops = corner_crops(loader.dataset[0]["image"], data.crop_size)  # the same at every evaluation
            layers = layer_health(network, crops, forward=run.learner.forward.through(network))
        return replace(evaluated, pictures=shown, layers=layers)

    return evaluate


def corner_crops(image: Tensor, size: int) -> Tensor:
    """The top-left and bottom-right `size` x `size` crops of an image (3, H, W), cut to fit it: (2, 3, h, w)."""
    return torch.stack([image[:, :size, :size], image[:, -size:, -size:]])
