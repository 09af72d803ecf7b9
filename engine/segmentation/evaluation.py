"""Scores of a segmentation network on a whole split, with a progress bar."""

from collections.abc import Callable
from functools import partial

import torch
from rich.progress import Progress
from rich.table import Table
from torch import Tensor
from torch.utils.data import DataLoader

from datasets import SegmentationDataset
from engine.process.console import counting, tracked
from engine.process.distributed import World
from engine.process.forward import Forward
from engine.process.stopping import UntilStopped
from engine.process.transfers import prefetched
from engine.records.confusion_picture import confusion_picture
from engine.records.evaluated import Evaluated
from engine.segmentation.inference import Views, predict
from engine.segmentation.scores import Counts, all_scores


def evaluate_split(
    forward: Forward,
    dataset: SegmentationDataset,
    images: DataLoader | UntilStopped,
    *,
    views: Views,
    world: World,
    progress: Progress,
    memory_advice: str,
    on_prediction: Callable[[dict, Tensor], None],
) -> Evaluated:
    """Evaluate a split with `all_scores`. Details: the views, and the confusion matrix (K, K) of the K trained classes.

    The host does not wait for a GPU until the last image is predicted: meanwhile it reads the next images.

    Args:
        images: this rank's share of `dataset`, one per minibatch, of any size. Scores are over the images of all ranks.
            Images without labels are predicted but not counted.
        memory_advice: see `predict`.
        on_prediction: called with every minibatch and its predictions, uint8 (N, H, W), both on the device. Each image
            that it reads there makes the host wait.

    MemoryError: see `predict`.
    """
    counts, predicted = Counts(dataset.table, world.device), 0
    loaded = tracked(progress, images, f"evaluating {dataset.name} {dataset.split}")
    with counting(progress, "windows") as windows:
        for minibatch in prefetched(loaded, world.device):
            predictions = predict(forward, minibatch["image"], views, memory_advice, windows)
            if "label" in minibatch:
                counts.add(predictions, minibatch)
            predicted += len(predictions)
            on_prediction(minibatch, predictions)
    counts.add_up(world)
    trained, scores = len(dataset.classes), all_scores(counts, dataset.table, dataset.has_instances)
    confusion = counts.confusion[:trained, :trained]
    title = f"{dataset.name} {dataset.split}: % of each label's pixels"
    shares = {"val/miou": scores["miou"], "val/pixel_accuracy": scores["pixel_accuracy"]}
    shares |= {f"val_iou/{name}": iou for name, iou in scores["iou"].items() if iou is not None}
    return Evaluated(
        scores=scores,
        summary=f"mIoU {100 * scores['miou']:.2f} %  pixel accuracy {100 * scores['pixel_accuracy']:.2f} %",
        images=sum(world.gather(predicted)),
        details={"confusion_matrix": confusion.tolist(), "views": views.record()},
        curves={name: 100 * share for name, share in shares.items()},
        table=partial(iou_table, scores),
        confusion=partial(confusion_picture, confusion.numpy(), dataset.classes, title),
    )


def iou_table(scores: dict) -> Table:
    """The scores of `all_scores` in percent, official ones on the right."""
    official = scores["official"]
    iiou = official.get("iiou", {})
    has_iiou = any(value is not None for value in iiou.values())
    on_the_right = "iIoU %" if has_iiou else "official %" if official and not iiou else None
    table = Table(caption_justify="left", min_width=40)
    table.add_column("class")
    for column in filter(None, ("IoU %", on_the_right)):
        table.add_column(column, justify="right")

    def row(name: str, *values: float | str | None, style: str | None = None) -> None:
        cells = [
            value if isinstance(value, str) else "–" if value is None else f"{100 * value:.2f}" for value in values
        ]
        table.add_row(name, *cells[: len(table.columns) - 1], style=style)

    beside = iiou or official.get("iou", {})
    for name in {**scores["iou"], **beside}:
        row(name, scores["iou"].get(name, ""), beside.get(name, ""))
    table.add_section()
    row("mean (mIoU)", scores["miou"], official.get("mean_iiou" if has_iiou else "miou", ""), style="bold")
    row("pixel accuracy", scores["pixel_accuracy"], official.get("pixel_accuracy", ""))
    if "mean_accuracy" in official:
        row("mean accuracy", "", official["mean_accuracy"])
        row("frequency-weighted IoU", "", official["frequency_weighted_iou"])
    if "category_iou" in official:
        table.add_section()
        row("category", "IoU %", "iIoU %" if has_iiou else "", style="bold")
        for name, iou in official["category_iou"].items():
            row(name, iou, official["category_iiou"].get(name, ""))
        row("mean of categories", official["mean_category_iou"], official["mean_category_iiou"], style="bold")
    if iiou and not has_iiou:
        table.caption = "no iIoU: it needs the instanceIds file of every image"
    return table


def corner_crops(image: Tensor, height: int, width: int) -> Tensor:
    """The top-left and bottom-right crops of an image (3, H, W), cut to fit it: (2, 3, h, w)."""
    return torch.stack([image[:, :height, :width], image[:, -height:, -width:]])
