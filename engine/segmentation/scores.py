"""Count predictions over a split, and reduce the counts to the scores of the paper and the benchmarks."""

import torch
from torch import Tensor

from datasets import IGNORED, INSTANCES_PER_CLASS, ClassTable
from engine.process.distributed import World

CPU = torch.device("cpu")
LANES = 16  # counters per cell of a confusion matrix; 128 bytes of int64, which a GPU adds to at once


class Counts:
    """The counts behind all scores, summed over the images of a split, on `device`.

    `unscored`: int64 (2,), for `inference.predict`: predicted pixels without a finite score, and all.

    `confusion`: int64 (G, G) pixels of the G classes `ClassTable.scored`, rows are labels, columns predictions. Columns
    of classes that the network does not know stay 0.
    `instances`: float64 (K, 3) for the K classes `ClassTable.names`: the number of instances; the share of an
    instance's pixels predicted as its class, summed over instances; the same for any class of its category.

    With several processes, each of `tensors()` summed over the processes is the count of all images: pixels exactly as
    in one process, shares up to rounding.
    """

    def __init__(self, table: ClassTable, device: torch.device = CPU):
        self.classes = len(table.scored)
        self.cells = torch.zeros(self.classes**2 + 2, LANES, dtype=torch.int64, device=device)  # `unscored` is last
        self.instances = torch.zeros(len(table.names), 3, dtype=torch.float64, device=device)
        categories = [table.categories.index(category) for category in table.categories]
        self.categories = torch.tensor(categories, device=device)

    @property
    def confusion(self) -> Tensor:
        return self.cells[:-2].sum(dim=1).view(self.classes, self.classes)

    @property
    def unscored(self) -> Tensor:
        return self.cells[-1, :2]

    def add(self, predictions: Tensor, minibatch: dict) -> None:
        """Add predictions, uint8 (N, H, W), for a minibatch of `datasets.WholeImages`, all on the counts' device.

        The host does not wait for a GPU, so it can prepare the next images meanwhile.
        """
        count_pixels(self.cells[:-1], predictions, minibatch["label"], self.classes)
        if "instances" in minibatch:
            for predicted, instances in zip(predictions, minibatch["instances"], strict=True):
                self.instances += instance_shares(predicted, instances, self.categories)

    def add_up(self, world: World) -> None:
        """Sum over all ranks and move to the CPU, where `all_scores` reads the counts. This waits for all images."""
        self.cells, self.instances = world.sum_(self.cells).cpu(), world.sum_(self.instances).cpu()


def count_pixels(cells: Tensor, predictions: Tensor, labels: Tensor, classes: int) -> None:
    """Add pixels to the cells of a confusion matrix, int64 (classes^2 + 1, lanes); the last cell counts ignored pixels.

    A cell's count is the sum of its lanes. Neighbouring columns of an image, often of one class, count in different
    lanes, because a GPU adds pixels to a single counter one by one. (Several lanes do not slow down a CPU.)

    predictions and labels: the same shape, integer dtypes. Memory and time do not grow with the number of classes, even
    with deterministic algorithms (where torchmetrics compares every pixel with every cell of the matrix).
    """
    lanes = cells.shape[1]
    lane = torch.arange(labels.shape[-1], dtype=torch.int32, device=labels.device).remainder_(lanes)
    numbers = labels.to(torch.int32, copy=True).mul_(classes).add_(predictions)
    numbers.masked_fill_(labels == IGNORED, classes**2)
    _count_(cells.view(-1), numbers.mul_(lanes).add_(lane))


def instance_shares(predictions: Tensor, instances: Tensor, categories: Tensor) -> Tensor:
    """Count the instances of one image, float64 (K, 3), as in `Counts`.

    Args:
        predictions: train ids, integer (H, W).
        instances: int32 (H, W), as `datasets.SegmentationDataset.scored` returns them.
        categories: int64 (K,), the category of each class.
    """
    classes, every = len(categories), len(categories) * INSTANCES_PER_CLASS
    agreement = (categories[:, None] == categories).int().fill_diagonal_(2)  # 1 within a category, 2 for the class
    truth = instances.div(INSTANCES_PER_CLASS, rounding_mode="trunc")  # 0 outside instances
    agrees = agreement.view(-1).index_select(0, truth.mul_(classes).add_(predictions).flatten())
    numbers = instances.masked_fill(instances < 0, every).flatten().mul_(3).add_(agrees)
    counts = torch.zeros(3 * (every + 1), dtype=torch.int64, device=instances.device)
    _count_(counts, numbers)
    _, as_category_only, as_class = pixels = counts.view(-1, 3)[:-1].T
    sizes, *hits = (pixels.sum(dim=0).double(), as_class.double(), (as_category_only + as_class).double())
    shares = torch.stack([(sizes > 0).double(), *(hit / sizes.clamp(min=1) for hit in hits)], dim=1)
    return shares.view(classes, INSTANCES_PER_CLASS, 3).sum(dim=1)


def _count_(counts: Tensor, numbers: Tensor) -> None:
    """Add how often each number occurs, in place. `torch.bincount` would make the host wait for the largest number."""
    one = torch.ones(1, dtype=counts.dtype, device=counts.device)
    counts.index_add_(0, numbers.flatten(), one.expand(numbers.numel()))


def all_scores(counts: Counts, table: ClassTable, has_instances: bool) -> dict:
    """Compute the paper's `segmentation_scores`, and under "official" the scores of the dataset's benchmark.

    The paper's score leaves out pixels of classes that only the benchmark counts. If the network knows such a class,
    predicting it on a pixel of another class is a false negative of that other class and nothing else.

    `has_instances`: whether all counted images have instances.
    """
    scores = segmentation_scores(counts.confusion[: len(table.counted)], table.counted)
    scores["official"] = {}
    if table.benchmark == "cityscapes":
        scores["official"] = cityscapes_scores(counts, table, has_instances)
    elif table.benchmark == "coco_stuff":
        scores["official"] = coco_stuff_scores(counts.confusion, table.scored)
    elif table.benchmark == "vistas":
        # The benchmark drops labels that it does not evaluate; we neither count nor predict them.
        scores["official"] = {"miou": scores["miou"]}
    return scores


def segmentation_scores(confusion: Tensor, classes: tuple[str, ...]) -> dict:
    """IoU per class, mean IoU (reduced as in the official Cityscapes evaluation) and pixel accuracy.

    IoU = TP / (TP + FP + FN) over the whole split, in [0, 1]. A class that occurs neither in labels nor in predictions
    has no IoU (None) and is left out of the mean.

    `confusion`: int64 (K, L), rows are labels of the K `classes`; L > K if some can be predicted but are not scored.

    Returns:
        {"miou": float, "iou": {name: float or None}, "pixel_accuracy": float}; NaN if no pixel is labelled.
    """
    counts = confusion.to("cpu", torch.float64)
    true_positives = counts.diag()
    iou = true_positives / _union(counts)  # 0 / 0 = NaN
    return {
        "miou": iou.nanmean().item(),
        "iou": _by_name(classes, iou),
        "pixel_accuracy": (true_positives.sum() / counts.sum()).item(),
    }


def cityscapes_scores(counts: Counts, table: ClassTable, has_instances: bool) -> dict:
    """Compute what `evalPixelLevelSemanticLabeling` of cityscapesscripts reports besides the IoU of classes.

    Within a category, confusing two classes is no error. iIoU = iTP / (iTP + FP + iFN): iTP and iFN are pixels inside
    instances (not groups), weighted by the class's average instance size over the size of this instance, so all
    instances of a class weigh the same. FP are unweighted pixels, groups included.

    Returns:
        {"miou", "category_iou": {name: float}, "mean_category_iou", "iiou": {name: float}, "mean_iiou",
        "category_iiou": {name: float}, "mean_category_iiou"}; None for classes that do not occur and, without
        `has_instances`, for every instance score.
    """
    names = tuple(dict.fromkeys(table.categories))
    member = torch.tensor([[category == name for category in table.categories] for name in names], dtype=torch.float64)
    confusion = counts.confusion.double()
    of_categories = member @ confusion @ member.T
    category_iou = of_categories.diag() / _union(of_categories)

    # An instance weighs average size / its size: its weighted pixels add up to the average size.
    sizes = torch.tensor([table.instance_sizes.get(name, 0.0) for name in table.names], dtype=torch.float64)
    total, as_class, as_category = (sizes[:, None] * counts.instances).T
    iiou = as_class / (total + _false_positives(confusion))
    category_iiou = (member @ as_category) / (member @ total + _false_positives(of_categories))
    if not has_instances:
        iiou, category_iiou = torch.full_like(iiou, torch.nan), torch.full_like(category_iiou, torch.nan)
    with_instances = sizes > 0
    all_with_instances = (member @ (~with_instances).double()) == 0
    iiou[~with_instances] = torch.nan
    category_iiou[~all_with_instances] = torch.nan
    return {
        "miou": _mean(confusion.diag() / _union(confusion)),
        "category_iou": _by_name(names, category_iou),
        "mean_category_iou": _mean(category_iou),
        "iiou": _by_name(table.names, iiou, with_instances),
        "mean_iiou": _mean(iiou),
        "category_iiou": _by_name(names, category_iiou, all_with_instances),
        "mean_category_iiou": _mean(category_iiou),
    }


def coco_stuff_scores(confusion: Tensor, classes: tuple[str, ...]) -> dict:
    """Compute what `COCOStuffeval` of the cocostuffapi reports for its 92 leaf classes; means are over labelled ones.

    `confusion`: int64 (G, G) pixels of the G `classes`, rows are labels.

    Returns:
        {"miou", "iou": {name: float or None}, "pixel_accuracy", "mean_accuracy", "frequency_weighted_iou"}.
    """
    counts = confusion.double()
    labelled = counts.sum(dim=1)
    present = labelled > 0
    iou = torch.where(present, counts.diag() / _union(counts), torch.nan)
    return {
        "miou": _mean(iou),
        "iou": _by_name(classes, iou),
        "pixel_accuracy": _value(counts.diag().sum() / labelled.sum()),
        "mean_accuracy": _mean(counts.diag() / labelled),
        "frequency_weighted_iou": _value((iou * labelled / labelled.sum())[present].sum()),
    }


def _false_positives(confusion: Tensor) -> Tensor:
    """(K, L) -> (K,)"""
    return confusion.sum(dim=0)[: len(confusion)] - confusion.diag()


def _union(confusion: Tensor) -> Tensor:
    """TP + FN + FP, (K, L) -> (K,)"""
    return confusion.sum(dim=1) + _false_positives(confusion)


def _mean(values: Tensor) -> float | None:
    """Mean of the values that are not NaN; None if all are."""
    return _value(values.nanmean())


def _value(value: Tensor) -> float | None:
    return None if value.isnan() else value.item()


def _by_name(names: tuple[str, ...], values: Tensor, chosen: Tensor | None = None) -> dict[str, float | None]:
    """{name: value, or None for NaN}, for all entries or the chosen ones."""
    kept = [True] * len(names) if chosen is None else chosen.tolist()
    return {name: _value(value) for name, value, keep in zip(names, values, kept, strict=True) if keep}
