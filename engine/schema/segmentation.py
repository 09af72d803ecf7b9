"""Keys of train_seg.py."""

import math
from contextlib import suppress
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, ClassVar

from omegaconf import MISSING

from engine.schema.data import Sampler, SegmentationData
from engine.schema.evaluation import SEGMENTATION, Evaluation, TrainedNetwork
from engine.schema.keys import choice, group, key
from engine.schema.network import Head
from engine.schema.training import Trainer, TrainingRun


@dataclass
class Loss:
    name: str = MISSING
    # frequency: a pixel weighs 1 / (classes x its class's share of the training pixels), which is 1 on average. Or a
    # number for each class, in their order, such as [1,2.5,1].
    class_weights: Any = key("none")
    called_with: ClassVar[tuple[str, ...]] = ("ignore_index", "weights", "stride")

    def check(self) -> None:
        """Turn texts of class weights into numbers. ValueError: they are no weights."""
        weights = self.class_weights
        if isinstance(weights, list):
            with suppress(ValueError, TypeError):  # the command line gives texts
                weights = self.class_weights = [float(weight) for weight in weights]
            is_fit = any(weights) and all(isinstance(weight, float) and 0 <= weight < math.inf for weight in weights)
        else:
            is_fit = weights in ("none", "frequency")
        if not is_fit:
            raise ValueError(
                f"loss.class_weights={weights}: expected none, frequency, or a number for each class, such as [1,2.5,1]"
            )

    @property
    def planned(self) -> "Loss":
        """A loss of about the same memory, by which a step is planned."""
        return self

    @property
    def needs_class_index(self) -> bool:
        """Whether it needs the counts of each class's pixels in the training split."""
        return self.class_weights == "frequency"


@choice("loss")
class CrossEntropyLoss(Loss):
    name: str = "cross_entropy"
    # auto: upsample the logits and compute their loss a tile at a time; false: all at once, with three full copies.
    tiles: str = key("auto", one_of=("auto", "false"))
    builds: ClassVar[str] = "engine.segmentation.cross_entropy.CrossEntropy"

    def more(self) -> dict[str, Any]:
        return {"tiles": self.tiles == "auto"}


@choice("loss")
class BootstrappedLoss(CrossEntropyLoss):
    name: str = "bootstrapped"
    fraction: float = key(0.25, above=0, most=1)  # share of a crop's pixels that counts, the paper's m


@choice("loss")
class LibraryLoss(Loss):
    name: str = "library"
    # Of the whole micro-batch, of all classes; focal is one class against the others.
    kind: str = key("dice", one_of=("dice", "focal", "tversky", "jaccard", "lovasz"))
    with_cross_entropy: float = key(0.0, least=0)  # times which cross-entropy is added
    builds: ClassVar[str] = "engine.segmentation.library_loss.LibraryLoss"

    def check(self) -> None:
        super().check()
        if self.kind == "lovasz" and self.class_weights != "none":
            raise ValueError(
                f"loss.class_weights={self.class_weights} with loss.kind=lovasz, which has none: leave it out, or "
                f"give loss.kind=jaccard"
            )

    @property
    def planned(self) -> Loss:
        return CrossEntropyLoss(tiles="false")  # the library's code asks for values, which a plan has not


@dataclass
class SegmentationTrainer(Trainer):
    pictures: int = key(4, least=0, free_on_resume=True)  # validation images shown in TensorBoard
    # Images of one size, or windows of an image, segmented at once. auto: on CUDA as many as have the pixels of a
    # micro-batch, on CPUs one. If memory runs out, the rest is segmented with half of them.
    evaluate_batch_size: Any = key("auto", word="auto", least=1, free_on_resume=True)


@dataclass
class SegmentationRun(TrainingRun):
    """One run of train_seg.py."""

    task: ClassVar[str] = SEGMENTATION
    entry: ClassVar[str] = "train_seg"
    score: ClassVar[str] = "miou"
    score_label: ClassVar[str] = "mIoU"
    second_score: ClassVar[str] = "pixel_accuracy"
    class_score: ClassVar[str] = "iou"
    head_modules: ClassVar[tuple[str, ...]] = ("head", "cls")
    evaluation_memory_advice: ClassVar[str] = (
        "eval.py, which can use the checkpoint of a training that stops here, and scripts.predict need less with "
        "window.size=1024 or smaller, all evaluations with a smaller data.base_size"
    )

    trainer: SegmentationTrainer = field(default_factory=SegmentationTrainer)
    fewest_at_a_time = property(attrgetter("head.fewest_at_a_time"))

    data: SegmentationData = group()
    head: Head = group()
    loss: Loss = group()
    # class_uniform if some classes are rare or small: mIoU counts all alike (on CamVid 67.7 % instead of 65.0).
    sampler: Sampler = group()

    def apply_options(self, options: TrainedNetwork) -> None:
        """Override the images at once. ValueError: the window does not fit the network's stride."""
        if isinstance(options, Evaluation) and options.batch_size is not None:
            self.trainer.evaluate_batch_size = options.batch_size
        size = options.window.size
        stride = self.body.output_stride
        if size is not None and size % stride:
            raise ValueError(
                f"window.size={size}: expected a multiple of the network's output stride {stride}, such as "
                f"{-(-size // stride) * stride}"
            )
