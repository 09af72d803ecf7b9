"""Keys of datasets and samplers."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

from omegaconf import MISSING

from datasets.augmentations import MOST_MIXES
from datasets.coco_stuff import LISTS
from datasets.stored import COLOURS, MOST_CHANNELS
from datasets.transforms import crop_shares
from engine.schema.keys import MOST_PIXELS, MOST_SECONDS, MOST_WORKERS, choice, key
from models.checkpoints.published import IMAGENET, Normalisation

_MUCH_PADDING = 0.2  # share of a crop
_LITTLE_PADDING = 0.15
_LITTLE_SHOWN = 0.05  # share of an image
_CROP_STEP = 16  # pixels, between sizes of crops that are advised


@dataclass
class Data:
    name: str = MISSING
    root: str | None = key(None, per_machine=True)  # the dataset's folder; null: the cache folder (synthetic only)
    train_split: Any = key("train", names=True)  # the split, or a list of splits, to train on
    val_split: str = "val"  # the split that is evaluated
    # Pixels, square unless there is data.crop_aspect. Larger ones show more context: memory.fit=crop finds the largest.
    crop_size: int = key(MISSING, above=0, most=MOST_PIXELS)
    # Crops per optimiser step, as in the paper: over all processes and accumulation steps. 8 to 16 for segmentation;
    # with 2 or 3 on a device give norm.sync=true, or body.frozen_norms with trained weights, with 1 norm.sync=true.
    crops_per_minibatch: int = key(MISSING, above=0, most=1_000_000)
    # Mean of each colour channel, from 0 to 1: images are normalised by mean and std. null: with body=timm what the
    # network's published weights expect, else ImageNet's.
    mean: list[float] | None = key(None, least=0, most=1, entries=("red", "green", "blue"))
    # Standard deviation of each colour channel; null: as for mean.
    std: list[float] | None = key(None, above=0, most=1, entries=("red", "green", "blue"))
    # The values of 16-bit images that become black and white; others are clipped. Cameras of 12 bits need [0,4095].
    # Channels of different ranges need two numbers each, one after the other: [0,4095,0,65535] for two channels.
    range16: list[int] = key([0, 65_535])
    # Train an experiment of a paper's table although images of the official dataset are missing.
    incomplete: bool = False
    # Processes that read and augment images, for each training process. auto: one per core that the machine has for
    # it, at most 8. Keep auto; give more only if the log says that steps wait for data and cores are idle, fewer if
    # memory is short, and 0, which reads in the training process itself, to look for an error.
    workers: Any = key("auto", word="auto", least=0, most=MOST_WORKERS, per_machine=True)
    # Check every file before the first step, unless unchanged since the last check.
    verify: bool = key(True, per_machine=True)
    # The run stops if its workers deliver nothing in this time; with data.workers=0 reads have no limit.
    timeout_seconds: int = key(300, above=0, most=MOST_SECONDS, per_machine=True)
    called_with: ClassVar[tuple[str, ...]] = ("root", "split")

    channels = COLOURS  # of an image; a key of data=folder
    most_mixes: ClassVar[int] = 0  # crops that an augmentation may ask for beside its own

    def check(self) -> None:
        has_pairs = len(self.range16) in (2, 2 * self.channels)
        pairs = zip(self.range16[::2], self.range16[1::2], strict=False)
        if not has_pairs or not all(0 <= low < high <= 65_535 for low, high in pairs):
            raise ValueError(
                f"data.range16={self.range16}: expected the lowest value and a higher one, from 0 to 65535, or these "
                f"two for each of the {self.channels} channels, one after the other"
            )

    def crop(self, size: int | None = None) -> tuple[int, int]:
        """(height, width) of a crop; `size` replaces data.crop_size."""
        return size or self.crop_size, size or self.crop_size

    def normalisation(self) -> Normalisation:
        """Mean and standard deviation of each channel, from 0 to 1.

        Of other than three channels, 0.5 until a run has measured them: memory does not depend on them.
        """
        half = (0.5,) * self.channels
        default = IMAGENET if self.channels == COLOURS else Normalisation(half, half)
        return Normalisation(tuple(self.mean or default.mean), tuple(self.std or default.std))

    @property
    def is_measured(self) -> bool:
        """Whether mean or std follow from the images, and a run has not measured them yet."""
        return self.channels != COLOURS and not (self.mean and self.std)

    def mean_colour(self) -> tuple[float, ...]:
        """The colour of padding: a level from 0 to 255 for each channel."""
        return tuple(255 * value for value in self.normalisation().mean)

    def doubts_of_sizes(self, sizes: Sequence[tuple[int, int, int]]) -> list[str]:
        """Whether crops fit training images of these `sizes`: (width, height, number of images)."""
        return []

    @property
    def order_key(self) -> str | None:
        """The key that chooses the order of the classes, if it matters and is not given."""
        return None

    def order_taken(self, classes: Sequence[str]) -> str | None:
        """Which order the classes are in, for the log, if folders named by numbers have two."""
        return None

    def waits(self, share: float, workers: int, cores: int) -> str:
        """A warning if steps wait for data. `workers` and `cores`: of each training process."""
        return (
            f"steps wait for data {100 * share:.0f} % of the time: raise data.workers (now {workers}, with {cores} "
            f"cores), or give smaller image files"
        )


@dataclass
class ColourJitter:
    """Random changes of a crop's colours; off by default, as in the paper."""

    brightness: float = key(0.0, least=0)  # s: times a random factor from max(0, 1 - s) to 1 + s
    contrast: float = key(0.0, least=0)  # s: times a random factor from max(0, 1 - s) to 1 + s
    saturation: float = key(0.0, least=0)  # s: times a random factor from max(0, 1 - s) to 1 + s
    hue: float = key(0.0, least=0, most=0.5)  # largest shift, in turns of the colour circle, either way


@dataclass
class SegmentationData(Data):
    crop_aspect: float = key(1.0, above=0)  # width of a crop over its height, which is crop_size
    # Longest side in pixels at scale 1, in training and evaluation; null: the image's own size. IoU is always counted
    # at the label's own size.
    base_size: int | None = key(None, above=0)
    # Smooth images that shrink: in evaluation as Pillow does, in training where they shrink to about half or less.
    antialias: bool = True
    # Range of the random factor by which a training image is resized.
    scale: list[float] = key([0.7, 2.0], above=0, most=10, entries=("lowest factor", "highest factor"))
    flip: float = key(0.5, least=0, most=1)  # probability that a training crop is mirrored
    colour_jitter: ColourJitter = field(default_factory=ColourJitter)
    most_mixes: ClassVar[int] = MOST_MIXES

    @property
    def never_shrinks(self) -> bool:
        """Whether no image shrinks so far that `antialias` has an effect (`datasets.transforms.scale_and_crop`)."""
        return self.base_size is None and self.scale[0] > 1 / 1.875

    def crop(self, size: int | None = None) -> tuple[int, int]:
        height = size or self.crop_size
        return height, max(1, round(height * self.crop_aspect))

    def check(self) -> None:
        super().check()
        if self.scale[0] > self.scale[1]:
            raise ValueError(f"data.scale={self.scale}: expected the lowest factor first")

    def doubts_of_sizes(self, sizes: Sequence[tuple[int, int, int]]) -> list[str]:
        """A warning if much of a crop is padding on average, with a size that fits, or if it shows little."""
        if not sizes:
            return []
        scale = self.scale[0], self.scale[1]
        shares = partial(crop_shares, sizes, scale=scale, base_size=self.base_size)
        shown, padding = shares(self.crop())
        if shown < _LITTLE_SHOWN:
            side = max(max(width, height) for width, height, _ in sizes)
            return [
                f"a crop shows {100 * shown:.1f} % of an image on average (data.crop_size={self.crop_size}, images of "
                f"up to {side} pixels): give data.base_size={2 * self.crop_size}, the longest side to which images are "
                f"resized, or a larger data.crop_size"
            ]
        if padding < _MUCH_PADDING:
            return []
        smaller = range(self.crop_size // _CROP_STEP * _CROP_STEP, 0, -_CROP_STEP)
        fitting_size = next((size for size in smaller if shares(self.crop(size))[1] < _LITTLE_PADDING), _CROP_STEP)
        return [
            f"{100 * padding:.0f} % of a crop is padding: give data.crop_size={fitting_size}, which fits the images "
            f"(now {self.crop_size})"
        ]


@choice("data")
class CamVidData(SegmentationData):
    name: str = "camvid"
    builds: ClassVar[str] = "datasets.camvid.CAMVID"


@choice("data")
class CityscapesData(SegmentationData):
    name: str = "cityscapes"
    builds: ClassVar[str] = "datasets.cityscapes.CITYSCAPES"


@choice("data")
class CocoStuffData(SegmentationData):
    name: str = "coco_stuff"
    lists: str = key("challenge", one_of=LISTS)  # the 40k / 5k images of the 2017 challenge, or all 118k / 5k
    builds: ClassVar[str] = "datasets.coco_stuff.COCO_STUFF"


@choice("data")
class FolderData(SegmentationData):
    name: str = "folder"
    # equal: refuse labels whose palettes give the same id different colours; any: use only the ids.
    palettes: str = key("equal", one_of=("equal", "any"))
    image_folder: str = "images"  # name of the images' folder, of each split or with the splits as folders in it
    label_folder: str = "labels"  # name of the labels' folder, beside it; the same if there is a label_suffix
    label_suffix: str = ""  # a label's name is its image's name plus this, such as _mask
    # Train and evaluate on the lists foldK/train.txt and foldK/val.txt, which scripts.make_classes folds=N writes for K
    # from 0 to N-1; -m data.fold=0,1,2,3,4 trains on each. null: no fold.
    fold: int | None = key(None, least=0)
    # Channels of every image, as its file has them: 4 for red, green, blue and infrared. 3 reads all images as RGB.
    channels: int = key(COLOURS, least=1, most=MOST_CHANNELS)
    # What pictures show as red, green and blue, counted from 1, such as [4,3,2], or as gray: [4]. null: the first three
    # channels, of one or two the first.
    shown: list[int] | None = key(None, least=1, most=MOST_CHANNELS, free_on_resume=True)
    # Mean and standard deviation of each channel, from 0 to 1. null: with three channels as for other datasets, else
    # measured on training images when the run begins, or as in a checkpoint of init.weights with as many channels.
    mean: list[float] | None = key(None, least=0, most=1)
    std: list[float] | None = key(None, above=0, most=1)
    builds: ClassVar[str] = "datasets.folder.FOLDER"

    def check(self) -> None:
        """ValueError: the mean, std, shown channels or jitter do not fit the number of channels."""
        super().check()
        for name, values in (("mean", self.mean), ("std", self.std)):
            if values and len(values) != self.channels:
                named = ": red, green, blue" if self.channels == COLOURS else f", as data.channels={self.channels}"
                raise ValueError(f"data.{name}={values}: expected {self.channels} numbers{named}")
        if self.shown and (len(self.shown) not in (1, COLOURS) or max(self.shown) > self.channels):
            raise ValueError(
                f"data.shown={self.shown}: expected one or three of the channels 1 to {self.channels}, such as "
                f"{[*range(1, COLOURS + 1)] if self.channels >= COLOURS else [1]}"
            )
        if self.channels != COLOURS and any(vars(self.colour_jitter).values()):
            raise ValueError(
                f"data.colour_jitter with data.channels={self.channels}: it changes red, green and blue, and other "
                f"channels have no colours: leave it out, or write an augmentation of your own"
            )


@choice("data")
class SyntheticData(SegmentationData):
    name: str = "synthetic"
    builds: ClassVar[str] = "datasets.synthetic.SYNTHETIC"


@choice("data")
class VistasData(SegmentationData):
    name: str = "vistas"
    builds: ClassVar[str] = "datasets.vistas.VISTAS"


@dataclass
class Sampler:
    """How training crops are drawn."""

    name: str = MISSING
    called_with: ClassVar = ("source", "crops_per_minibatch", "seed", "steps", "start_step", "rank", "world_size")
    # It draws from the class index of the training split, not from the number of its images.
    needs_class_index: ClassVar[bool] = False
    folder: str | None = key(None, per_machine=True)  # folder of the class index; null: the cache folder


@choice("sampler")
class UniformSampler(Sampler):
    """Every image once per epoch."""

    name: str = "uniform"
    builds: ClassVar[str] = "datasets.samplers.ShuffledMinibatches"


@choice("sampler")
class ClassUniformSampler(Sampler):
    name: str = "class_uniform"
    fraction: float = key(1.0, above=0, most=1)  # share of an epoch's crops drawn by class; the rest by image
    needs_class_index: ClassVar[bool] = True
    builds: ClassVar[str] = "datasets.samplers.ClassUniformMinibatches"
