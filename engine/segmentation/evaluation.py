"""Scores and predictions of a segmentation network on a whole split, with a progress bar."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from rich.progress import Progress
from rich.table import Table
from torch import Tensor
from torch.utils.data import DataLoader

from datasets import SegmentationDataset
from engine.process.console import logger, speed_of, table_of_shares, tracked
from engine.process.distributed import World
from engine.process.output_files import WrittenBehind, short_name, write_file
from engine.process.stopping import UntilStopped
from engine.process.transfers import HostCopy, prefetched
from engine.records.added_scores import NOTHING_ADDED, PROBABILITIES, AddedScores
from engine.records.evaluated import Evaluated
from engine.segmentation.batches import AtOnce, of_equal_size
from engine.segmentation.inference import Views, predict
from engine.segmentation.pictures import compared_images, folder_for_pictures, official_png, overlay_png
from engine.segmentation.scores import PER_CLASS, Counts, ImageScores, segmentation_scores
from models.forward import Forward


def evaluate_split(
    forward: Forward,
    dataset: SegmentationDataset,
    images: DataLoader | UntilStopped,
    *,
    views: Views,
    world: World,
    progress: Progress,
    on_prediction: Callable[[dict, Tensor], None],
    at_once: AtOnce,
    added: AddedScores = NOTHING_ADDED,
) -> Evaluated:
    """Evaluate a split with `segmentation_scores`. Details: the views, and the confusion matrix (K, K) of K classes.

    The host waits for a GPU only after the last image; meanwhile it reads the next images.

    Args:
        images: this rank's share of `dataset`, one per minibatch, of any size. Scores cover the images of all ranks.
            Images without labels are predicted but not counted.
        on_prediction: called with every batch and its predictions, uint8 (N, H, W), both on the device. If it reads
            an image there, the host waits.
        at_once: how many images of equal size are a batch. Images of other sizes may overtake.
        added: further scores.

    MemoryError: see `predict`. FloatingPointError: some pixels have no finite score.
    """
    counts = Counts(dataset.table, world.device)
    predicted = 0
    in_first_part = 0  # images, which are not timed
    since_s = 0.0

    def counted(batch: dict, windows: int) -> Tensor:
        unscored = torch.zeros_like(counts.unscored)

        def rows_seen(probabilities: Tensor, rows: slice) -> None:
            added.add_probabilities(probabilities, batch["label"][:, rows], batch["name"])

        seen = rows_seen if "label" in batch and added.reading(PROBABILITIES) else None
        with added.undone_after_errors():
            predictions = predict(
                forward, batch["image"], views, unscored=unscored, windows=windows, on_probabilities=seen
            )
        if "label" in batch:
            counts.add(predictions, batch)
        counts.unscored.add_(unscored)  # last: an attempt that runs out of memory counts nothing
        return predictions

    loaded = tracked(progress, images, f"evaluating {dataset.name} {dataset.split}")
    together = of_equal_size(prefetched(loaded, world.device), lambda size: at_once.fitting(forward, views, size)[0])
    for batch in together:
        for part, predictions in at_once.attempts(forward, views, batch, counted):
            predicted += len(predictions)
            if "label" in part:
                added.add(predictions, part["label"], part["name"])
            on_prediction(part, predictions)
            in_first_part = in_first_part or len(predictions)
            since_s = since_s or time.perf_counter()
    counts.add_up(world)
    if predicted > in_first_part:
        logger.info(speed_of(predicted - in_first_part, since_s))
    unscored, total = counts.unscored.tolist()
    forward.check_scores(unscored, total, "pixels")
    scores = segmentation_scores(counts.confusion, dataset.classes)
    shares = {"val/miou": scores["miou"], "val/pixel_accuracy": scores["pixel_accuracy"]}
    for kind in PER_CLASS:
        shares |= {f"val_{kind}/{name}": share for name, share in scores[kind].items() if share is not None}
    evaluated = Evaluated(
        scores=scores,
        summary=f"mIoU {100 * scores['miou']:.2f} %  pixel accuracy {100 * scores['pixel_accuracy']:.2f} %",
        images=sum(world.gather(predicted)),
        details={"confusion_matrix": counts.confusion.tolist(), "views": views.record()},
        curves={name: 100 * share for name, share in shares.items()},
        table=partial(iou_table, scores),
    )
    return added.added_to(evaluated, world)


@contextmanager
def written_predictions(
    dataset: SegmentationDataset, world: World, predictions: str | None, overlays: str | None, per_image: str | None
) -> Iterator[Callable[[dict, Tensor], None]]:
    """Context with an `on_prediction` that fills the folders `predictions` and `overlays`, and the table `per_image`.

    `predictions` get the dataset's official encoding, `overlays` image | ground truth | prediction.
    ValueError, naming one of the three: it cannot be written, or would replace other files; or the split lacks labels.
    """
    paths = {key: path for key, path in (("predictions", predictions), ("overlays", overlays)) if path}
    if len({Path(path).resolve() for path in paths.values()}) < len(paths):
        raise ValueError(f"predictions={predictions} is also the folder of overlays: give two folders")
    names = [f"{short_name(entry.name)}.png" for entry in dataset.files] if paths else []
    if per_image is not None and not dataset.has_labels:
        raise ValueError(f"per_image={per_image}: split {dataset.split} of {dataset.name} has no labels")
    table = None if per_image is None else ImageScores(dataset.classes, Path(per_image), "per_image")
    makers = {"predictions": official_png, "overlays": overlay_png}
    kinds = [(makers[key], folder_for_pictures(key, path, dataset, names)) for key, path in paths.items()]

    def write(minibatch: dict, predicted: Tensor) -> None:
        for number, name in enumerate(map(short_name, minibatch["name"] if kinds else [])):
            copied = HostCopy(compared_images(minibatch, predicted, number, dataset.shown))
            size = 14 * predicted[number].nbytes  # an overlay has nine bytes a pixel; the copy has five
            for make, folder in kinds:
                files.add(partial(make, dataset, copied), partial(write_file, folder / f"{name}.png"), size)
        if table is not None:
            table.add(minibatch, predicted)

    with WrittenBehind() as files:  # whose threads wait for the device
        yield write
    if table is not None:
        table.write(world)


def iou_table(scores: dict) -> Table:
    """The scores of `segmentation_scores` in percent."""
    rows = {name: (iou, scores["accuracy"][name]) for name, iou in scores["iou"].items()}
    totals = {"mean (mIoU)": scores["miou"], "pixel accuracy": scores["pixel_accuracy"]}
    return table_of_shares(["class", "IoU %", "accuracy %"], rows, totals)
