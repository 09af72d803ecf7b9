"""Scores of a classification network on a whole split, with a progress bar."""

from functools import partial

import torch
from rich.progress import Progress
from torch import Tensor
from torch.utils.data import DataLoader

from datasets import ClassificationDataset
from engine.process.allocations import memory_errors
from engine.process.console import table_of_shares, tracked
from engine.process.distributed import World
from engine.process.stopping import UntilStopped
from engine.process.transfers import prefetched
from engine.records.added_scores import NOTHING_ADDED, PROBABILITIES, AddedScores
from engine.records.evaluated import Evaluated
from models.forward import Forward

MOST_LISTED = 100  # most classes for which a table and a confusion matrix are legible


def class_logits(forward: Forward, images: Tensor) -> Tensor:
    """Float32 logits (N, K) of images (N, 3, h, w), or their mean over the crops (N, crops, 3, h, w)."""
    if images.ndim == 4:
        return forward(images).float()
    logits = forward(images.flatten(0, 1)).float()  # (N * crops, K)
    return logits.unflatten(0, images.shape[:2]).mean(dim=1)


def evaluate_split(
    forward: Forward,
    dataset: ClassificationDataset,
    images: DataLoader | UntilStopped,
    *,
    world: World,
    progress: Progress,
    added: AddedScores = NOTHING_ADDED,
) -> Evaluated:
    """Evaluate a split: the share of images whose class has the highest logit (top1), or one of the five highest.

    Details: each class's top-1 accuracy (None without images), and with up to `MOST_LISTED` classes the confusion
    matrix (K, K), whose rows are labels. The host waits for a GPU only once, for the counts.

    Args:
        images: this rank's share of `dataset`. Scores cover the images of all ranks.
        added: further scores.

    MemoryError: the device does not have enough memory. FloatingPointError: some images have no finite score.
    """
    cells = torch.zeros(len(dataset.classes) ** 2 + 2, dtype=torch.int64, device=world.device)
    forward.network.eval()
    minibatches = tracked(progress, images, f"evaluating {dataset.name} {dataset.split}", kind="minibatches")
    for minibatch in prefetched(minibatches, world.device):
        size = "x".join(map(str, minibatch["image"].shape))
        with (
            memory_errors(f"while images of shape {size} were evaluated. {forward.memory_advice}"),
            torch.inference_mode(),
        ):
            logits = class_logits(forward, minibatch["image"])
            count(cells, logits, minibatch["label"].to(world.device, non_blocking=True))
            added.add(logits.argmax(dim=1), minibatch["label"])
            if added.scores_reading(PROBABILITIES):
                added.add_probabilities(logits.softmax(dim=1), minibatch["label"].to(world.device))
    return added.sum_and_add_to(_evaluated(forward, dataset, world.sum_(cells)), world)


def _evaluated(forward: Forward, dataset: ClassificationDataset, cells: Tensor) -> Evaluated:
    """The scores of the cells that `count` has filled. FloatingPointError: some images have no finite score."""
    classes = len(dataset.classes)
    counts = cells.cpu().numpy()
    confusion = counts[:-2].reshape(classes, classes)
    in_top5, unscored = counts[-2:].tolist()
    class_counts = confusion.sum(axis=1).tolist()
    right_counts = confusion.diagonal().tolist()
    total = sum(class_counts)
    forward.check_scores(unscored, total, "images")
    scores = {"top1": sum(right_counts) / max(total, 1), "top5": in_top5 / max(total, 1)}
    accuracy = {
        name: right / count if count else None
        for name, right, count in zip(dataset.classes, right_counts, class_counts, strict=True)
    }
    details: dict[str, object] = {"accuracy": accuracy}
    curves = {f"val/{name}": 100 * score for name, score in scores.items()}
    is_listed = classes <= MOST_LISTED
    if is_listed:
        details["confusion_matrix"] = confusion.tolist()
        curves |= {f"val_accuracy/{name}": 100 * share for name, share in accuracy.items() if share is not None}
    rows = {name: (share,) for name, share in accuracy.items()} if is_listed else {}
    totals = {"top-1": scores["top1"], "top-5": scores["top5"]}
    return Evaluated(
        scores=scores,
        summary=f"top-1 {100 * scores['top1']:.2f} %  top-5 {100 * scores['top5']:.2f} %",
        images=total,
        details=details,
        curves=curves,
        table=partial(table_of_shares, ["class", "accuracy %"], rows, totals),
    )


def count(cells: Tensor, logits: Tensor, labels: Tensor) -> None:
    """Add the predictions of logits (N, K) for labels, int64 (N,), to `cells`, int64 (K * K + 2,), without a wait.

    They are the confusion matrix, whose rows are labels, then the number of images whose class is among the five
    highest, and the number of images without a finite score.
    """
    highest, ranked = logits.topk(min(5, logits.shape[1]), dim=1)  # (N, 5), the highest first
    cells.index_add_(0, labels * logits.shape[1] + ranked[:, 0], torch.ones_like(labels))
    cells[-2] += (ranked == labels[:, None]).sum()
    cells[-1] += highest[:, 0].isfinite().logical_not_().sum()
