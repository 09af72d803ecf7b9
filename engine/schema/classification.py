"""Keys of train_imagenet.py."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from datasets.class_names import ORDERS, two_orders
from engine.schema.data import Data
from engine.schema.evaluation import CLASSIFICATION, TEN, TEN_CROP, Evaluation, TrainedNetwork, if_changed
from engine.schema.keys import choice, group, key
from engine.schema.training import Extent, Trainer, TrainingRun


@dataclass
class ClassificationData(Data):
    train_split: str = "train"  # the split that is trained on
    flip: float = key(0.5, least=0, most=1)  # probability that a training crop is mirrored

    mean_image = False  # whether the training images' mean is subtracted; a key of small images


@dataclass
class ImageNetData(ClassificationData):
    # How training crops are drawn: release (random area and aspect ratio, resized), or paper (short side resized, then
    # a random crop). Both change colours and lighting.
    crops: str = key("release", one_of=("release", "paper"))
    # Pixels of the short side, before the centre crop in evaluation and the paper's crops.
    resize: int = key(256, above=0)

    def check(self) -> None:
        super().check()
        if self.crop_size > self.resize:
            raise ValueError(f"data.crop_size={self.crop_size}: expected at most data.resize={self.resize}")


@dataclass
class ClassFoldersData(ImageNetData):
    # How class folders are sorted: as text (0, 1, 10, 2; null does too) or by the numbers in their names (0, 1, 2, 10).
    # Give it for files that name no classes if the orders differ.
    class_order: str | None = key(None, one_of=ORDERS)

    @property
    def order_key(self) -> str | None:
        return "data.class_order" if self.class_order is None else None

    def order_taken(self, classes: Sequence[str]) -> str | None:
        orders = two_orders(classes)
        if orders is None:
            return None
        return f"classes are sorted as {self.class_order or ORDERS[0]} (data.class_order), of {orders}"


@dataclass
class SmallImagesData(ClassificationData):
    """Images of 32x32 pixels, kept in memory."""

    padding: int = key(4, least=0)  # pixels of mean colour around an image before a training crop is drawn
    # Subtract the mean over all training images, pixel by pixel, before padding; with data.mean=[0,0,0] (RevNet).
    mean_image: bool = False

    def check(self) -> None:
        super().check()
        if self.mean_image and any(self.normalisation().mean):
            mean = list(self.normalisation().mean)
            raise ValueError(
                f"data.mean_image=true with data.mean={mean}: the mean image takes the place of the mean colour; "
                f"give data.mean=[0,0,0]"
            )


@choice("data")
class CIFAR10Data(SmallImagesData):
    name: str = "cifar10"
    builds: ClassVar[str] = "datasets.cifar.CIFAR10"


@choice("data")
class CIFAR100Data(SmallImagesData):
    name: str = "cifar100"
    builds: ClassVar[str] = "datasets.cifar.CIFAR100"


@choice("data")
class ImageFolderData(ClassFoldersData):
    name: str = "image_folder"
    builds: ClassVar[str] = "datasets.imagenet.IMAGE_FOLDER"


@choice("data")
class ImageNetChallengeData(ClassFoldersData):
    name: str = "imagenet"
    builds: ClassVar[str] = "datasets.imagenet.IMAGENET"


@choice("data")
class ShapesData(SmallImagesData):
    name: str = "shapes"
    builds: ClassVar[str] = "datasets.shapes.SHAPES"


@dataclass
class ClassificationTrainer(Trainer):
    evaluate_batch_size: int = key(100, above=0, free_on_resume=True)  # images classified at once


@dataclass
class ClassificationRun(TrainingRun):
    """One run of train_imagenet.py."""

    task: ClassVar[str] = CLASSIFICATION
    entry: ClassVar[str] = "train_imagenet"
    score: ClassVar[str] = "top1"
    score_label: ClassVar[str] = "top-1"
    second_score: ClassVar[str] = "top5"
    class_score: ClassVar[str] = "accuracy"
    head_modules: ClassVar[tuple[str, ...]] = ("classifier",)
    evaluation_memory_advice: ClassVar[str] = (
        "Fewer images at once (batch_size, in a training trainer.evaluate_batch_size) need less; eval.py can use the "
        "checkpoint of a training that stops here"
    )

    trainer: ClassificationTrainer = field(default_factory=ClassificationTrainer)
    data: ClassificationData = group()

    def check(self) -> None:
        super().check()
        if self.data.mean_image and self.augmentations:
            raise ValueError(
                f"data.mean_image=true with augmentations=[{','.join(self.augmentations)}], which take whole levels "
                f"from 0 to 255: leave one of them out"
            )

    def doubts(self, extent: Extent) -> Iterator[str]:
        yield from super().doubts(extent)
        if extent.official_class_count not in (None, extent.class_count):
            folder_text = f"data.root={self.data.root} holds {extent.class_count} classes, one per folder"
            yield f"{folder_text}; {self.data.name} has {extent.official_class_count}"

    def apply_options(self, options: TrainedNetwork) -> None:
        """Override the keys of crops and batches. ValueError: they do not fit the images."""
        data = self.data
        if isinstance(options, Evaluation):
            if isinstance(options.batch_size, int):
                self.trainer.evaluate_batch_size = options.batch_size
            elif options.view == TEN_CROP:
                self.trainer.evaluate_batch_size = max(1, self.trainer.evaluate_batch_size // TEN)
        if isinstance(data, ImageNetData):
            crop = options.crop or data.crop_size
            data.resize = options.resize or round(crop * data.resize / data.crop_size)
            data.crop_size = crop
            if crop > data.resize:
                raise ValueError(f"crop={crop} resize={data.resize}: expected a crop of at most resize pixels")
            return
        words = [
            *if_changed(options.view, "center", "view={}"),
            *if_changed(options.crop, None, "crop={}"),
            *if_changed(options.resize, None, "resize={}"),
        ]
        if words:
            raise ValueError(f"{' '.join(words)}: {data.name} is evaluated on whole images; leave this out")
