"""Scores of a classification network on a whole split, with a progress bar."""

from functools import partial

import torch
from rich.progress import Progress
from rich.table import Table
from torch import Tensor
from torch.utils.data import DataLoader

from datasets import ClassificationDataset
from engine.process.allocations import memory_errors
from engine.process.console import table_of, tracked
from engine.process.distributed import World
from engine.process.forward import Forward
from engine.process.stopping import UntilStopped
from engine.process.transfers import prefetched
from engine.records.confusion_picture import confusion_picture
from engine.records.evaluated import Evaluated

DRAWN_CLASSES = 100  # most classes for which a table and a confusion matrix are legible


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
) -> Evaluated:
    """Evaluate a split: the share of images whose class has the highest logit (top1), or one of the five highest.

    Details: each class's top-1 accuracy (None without images), and with up to `DRAWN_CLASSES` classes the confusion
    matrix (K, K), whose rows are labels. The host waits for a GPU only once, for the counts.

    Args:
        images: this rank's share of `dataset`. Scores cover the images of all ranks.

    MemoryError: the device does not have enough memory. FloatingPointError: some images have no finite score.
    """
    classes = len(dataset.classes)
    counts = Counts(classes, world.device)
    forward.network.eval()
    loaded = tracked(progress, images, f"evaluating {dataset.name} {dataset.split}", kind="minibatches")
    for minibatch in prefetched(loaded, world.device):
        size = "x".join(map(str, minibatch["image"].shape))
        with (
            memory_errors(f"while images of shape {size} were evaluated. {forward.memory_advice}"),
            torch.inference_mode(),
        ):
            logits = class_logits(forward, minibatch["image"])
            counts.add(logits, minibatch["label"].to(world.device, non_blocking=True))
    *found, unscored = world.sum_(torch.cat([counts.of_classes.view(-1), counts.unscored])).tolist()
    images_of, right, top5 = (found[begin : begin + classes] for begin in range(0, 3 * classes, classes))
    count = sum(images_of)
    forward.check_scores(unscored, count, "images")
    scores = {"top1": sum(right) / max(count, 1), "top5": sum(top5) / max(count, 1)}
    accuracy = {
        name: own_right / own if own else None
        for name, own_right, own in zip(dataset.classes, right, images_of, strict=True)
    }
    details: dict[str, object] = {"accuracy": accuracy}
    picture = None
    if counts.confusion is not None:
        confusion = world.sum_(counts.confusion).cpu()
        details["confusion_matrix"] = confusion.tolist()
        title = f"{dataset.name} {dataset.split}: % of each class's images"
        picture = partial(confusion_picture, confusion.numpy(), dataset.classes, title)
    return Evaluated(
        scores=scores,
        summary=f"top-1 {100 * scores['top1']:.2f} %  top-5 {100 * scores['top5']:.2f} %",
        images=count,
        details=details,
        curves={f"val/{name}": 100 * score for name, score in scores.items()},
        table=partial(accuracy_table, scores, accuracy),
        confusion=picture,
    )


class Counts:
    """Counts of predictions, on the device.

    of_classes: int64 (3, K): each class's images, those whose highest logit is right, and those with the right class
        among the five highest.
    unscored: int64 (1,), the number of images without a finite score.
    confusion: int64 (K, K), rows are labels; None above `DRAWN_CLASSES`.
    """

    def __init__(self, classes: int, device: torch.device):
        self.of_classes = torch.zeros(3, classes, dtype=torch.int64, device=device)
        self.unscored = torch.zeros(1, dtype=torch.int64, device=device)
        drawn = classes <= DRAWN_CLASSES
        self.confusion = torch.zeros(classes, classes, dtype=torch.int64, device=device) if drawn else None

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Count the predictions of logits (N, K) for labels, int64 (N,)."""
        classes = self.of_classes.shape[1]
        highest, ranked = logits.topk(min(5, classes), dim=1)  # (N, 5), the highest first
        self.unscored += highest[:, 0].isfinite().logical_not_().sum()
        found = ranked == labels[:, None]
        self.of_classes.index_add_(1, labels, torch.stack([torch.ones_like(labels), found[:, 0], found.any(dim=1)]))
        if self.confusion is not None:
            self.confusion.view(-1).index_add_(0, labels * classes + ranked[:, 0], torch.ones_like(labels))


def accuracy_table(scores: dict, accuracy: dict) -> Table:
    """The accuracies in percent, with a row for each class unless there are many."""
    listed = accuracy if len(accuracy) <= DRAWN_CLASSES else {}
    rows = ([name, "–" if share is None else f"{100 * share:.2f}"] for name, share in listed.items())
    table = table_of(["class", "accuracy %"], rows)
    table.add_section()
    table.add_row("top-1", f"{100 * scores['top1']:.2f}", style="bold")
    table.add_row("top-5", f"{100 * scores['top5']:.2f}")
    return table
