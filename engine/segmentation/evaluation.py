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
from engine.segmentation.batches import AtOnce, batches_of_equal_size
from engine.segmentation.inference import Views, predict
from engine.segmentation.pictures import compared_images, folder_for_pictures, official_png, overlay_png
from engine.segmentation.scores import PER_CLASS, Counts, ImageScores, segmentation_scores
from models.forward import Forward


def evaluate_split(
    forward: Forward,
    dataset: SegmentationDataset,
    images: DataLoader | UntilStopped,
    *,
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
        at_once: the views of each image, and how many of equal size are a batch. Images of other sizes may overtake.
        added: further scores.

    MemoryError: see `predict`. FloatingPointError: some pixels have no finite score.
    """
    counts = Counts(len(dataset.classes), world.device)
    count_predictions = partial(_predict_and_count, forward, at_once.views, counts, added)
    image_count = 0
    untimed_count = 0  # images of the first part
    since_s = 0.0
    loaded = tracked(progress, images, f"evaluating {dataset.name} {dataset.split}")
    minibatches = prefetched(loaded, world.device)
    for batch in batches_of_equal_size(minibatches, lambda size: at_once.counts_per_pass(forward, size)[0]):
        for part, predictions in at_once.predict_parts(forward, batch, count_predictions):
            image_count += len(predictions)
            if "label" in part:
                added.add(predictions, part["label"], part["name"])
            on_prediction(part, predictions)
            untimed_count = untimed_count or len(predictions)
            since_s = since_s or time.perf_counter()
    counts.add_up(world)
    if image_count > untimed_count:
        logger.info(speed_of(image_count - untimed_count, since_s))
    unscored_count, pixel_count = counts.unscored.tolist()
    forward.check_scores(unscored_count, pixel_count, "pixels")
    evaluated = _evaluated(counts.confusion, dataset, at_once.views, image_count=sum(world.gather(image_count)))
    return added.sum_and_add_to(evaluated, world)


def _predict_and_count(
    forward: Forward, views: Views, counts: Counts, added: AddedScores, batch: dict, windows: int
) -> Tensor:
    """Predict a batch. Adds the predictions to `counts`, and to each score in `added` that reads probabilities.

    An attempt that runs out of memory counts nothing. `windows`: see `predict`.
    """
    unscored = torch.zeros_like(counts.unscored)

    def add_rows(probabilities: Tensor, rows: slice) -> None:
        added.add_probabilities(probabilities, batch["label"][:, rows], batch["name"])

    on_probabilities = add_rows if "label" in batch and added.scores_reading(PROBABILITIES) else None
    with added.undone_after_errors():
        predictions = predict(
            forward, batch["image"], views, unscored=unscored, windows=windows, on_probabilities=on_probabilities
        )
    if "label" in batch:
        counts.add(predictions, batch["label"])
    counts.unscored.add_(unscored)  # last, so that a failed attempt leaves it
    return predictions


def _evaluated(confusion: Tensor, dataset: SegmentationDataset, views: Views, image_count: int) -> Evaluated:
    """The scores of a confusion matrix, as they are recorded and shown."""
    scores = segmentation_scores(confusion, dataset.classes)
    shares = {"val/miou": scores["miou"], "val/pixel_accuracy": scores["pixel_accuracy"]}
    for kind in PER_CLASS:
        shares |= {f"val_{kind}/{name}": share for name, share in scores[kind].items() if share is not None}
    return Evaluated(
        scores=scores,
        summary=f"mIoU {100 * scores['miou']:.2f} %  pixel accuracy {100 * scores['pixel_accuracy']:.2f} %",
        images=image_count,
        details={"confusion_matrix": confusion.tolist(), "views": views.record()},
        curves={name: 100 * share for name, share in shares.items()},
        table=partial(iou_table, scores),
    )


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
    names = [f"{short_name(file.name)}.png" for file in dataset.files] if paths else []
    if per_image is not None and not dataset.has_labels:
        raise ValueError(f"per_image={per_image}: split {dataset.split} of {dataset.name} has no labels")
    table = None if per_image is None else ImageScores(dataset.classes, Path(per_image), "per_image")
    encoders = {"predictions": official_png, "overlays": overlay_png}
    outputs = [(encoders[key], folder_for_pictures(key, path, dataset, names)) for key, path in paths.items()]

    def write(minibatch: dict, predictions: Tensor) -> None:
        for number, name in enumerate(map(short_name, minibatch["name"] if outputs else [])):
            copied = HostCopy(compared_images(minibatch, predictions, number, dataset.shown))
            size = 14 * predictions[number].nbytes  # an overlay has nine bytes a pixel; the copy has five
            for encode, folder in outputs:  # `files`: the context below
                files.add(partial(encode, dataset, copied), partial(write_file, folder / f"{name}.png"), size)
        if table is not None:
            table.add(minibatch, predictions)

    with WrittenBehind() as files:  # whose threads wait for the device
        yield write
    if table is not None:
        table.write(world)


def iou_table(scores: dict) -> Table:
    """The scores of `segmentation_scores` in percent."""
    rows = {name: (iou, scores["accuracy"][name]) for name, iou in scores["iou"].items()}
    totals = {"mean (mIoU)": scores["miou"], "pixel accuracy": scores["pixel_accuracy"]}
    return table_of_shares(["class", "IoU %", "accuracy %"], rows, totals)
