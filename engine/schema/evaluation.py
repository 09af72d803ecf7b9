"""Keys of eval.py and scripts.predict."""

from dataclasses import dataclass, field

from omegaconf import MISSING

from engine.schema.keys import key
from engine.schema.segmentation import SegmentationRun, evaluation_memory_advice
from engine.schema.training import DEVICES, PRECISIONS

OVERLAP = 0.25


@dataclass
class TrainedData:
    base_size: int | None = key(None, above=0)  # null: as in training
    antialias: bool | None = None  # null: as in training


@dataclass
class EvaluationData(TrainedData):
    root: str | None = None  # null: as in training
    split: str | None = None  # null: the validation split in training


@dataclass
class TrainedHead:
    # null: as in training
    pooling_size: list[int] | None = key(None, above=0, entries=("height", "width in feature cells"))


@dataclass
class Window:
    """Larger images are evaluated in overlapping squares, to limit memory."""

    size: int | None = key(None, above=0)  # side in pixels, a multiple of body.output_stride; null: whole images
    overlap: float = key(OVERLAP, least=0, most=0.9)  # smallest fraction of a side that neighbours have in common

    def check(self) -> None:
        if self.size is None and self.overlap != OVERLAP:
            raise ValueError(f"window.overlap={self.overlap} needs window.size=PIXELS, the side of the windows")


@dataclass
class TestTimeAugmentation:
    """Average the softmax over several views of each image."""

    scales: list[float] = key([1.0], above=0)  # 1 is data.base_size
    flip: bool = False  # also mirror each scale left to right


@dataclass
class TrainedNetwork:
    """A checkpoint, and how its network predicts."""

    checkpoint: str = MISSING
    averaged: bool = True  # the averaged weights, if the checkpoint has them
    head: TrainedHead = field(default_factory=TrainedHead)
    window: Window = field(default_factory=Window)
    tta: TestTimeAugmentation = field(default_factory=TestTimeAugmentation)
    device: str = key("auto", one_of=DEVICES)
    precision: str | None = key(None, one_of=PRECISIONS)  # null: as in training
    timeout_seconds: int | None = key(None, above=0)  # how long to wait for the next image; null: as in training
    data: TrainedData = field(default_factory=TrainedData)

    def apply_to(self, config: SegmentationRun) -> None:
        """Override the training's keys by those given here. ValueError if they do not fit the network."""
        config.data.base_size = self.data.base_size or config.data.base_size
        if self.data.antialias is not None:
            config.data.antialias = self.data.antialias
        config.head.pooling_size = self.head.pooling_size or config.head.pooling_size
        config.trainer.precision = self.precision or config.trainer.precision
        config.data.timeout_seconds = self.timeout_seconds or config.data.timeout_seconds
        config.check_precision()
        size, stride = self.window.size, config.body.output_stride
        if size is not None and size % stride:
            raise ValueError(
                f"window.size={size}: expected a multiple of the network's output stride {stride}, such as "
                f"{-(-size // stride) * stride}"
            )


@dataclass
class Evaluation(TrainedNetwork):
    """One run of eval.py."""

    data: EvaluationData = field(default_factory=EvaluationData)
    predictions: str | None = None  # folder for predictions in the dataset's official encoding
    overlays: str | None = None  # folder for pictures: image | ground truth | prediction
    overlay_images: int | None = key(None, above=0)  # how many; null: all
    results: str | None = None  # JSON file; null: in the run's folder
    workers: int = key(2, least=0)  # processes that read
    batch_size: int = key(1, above=0)  # most images of equal size predicted at once

    def check(self) -> None:
        if self.overlay_images is not None and self.overlays is None:
            raise ValueError(f"overlay_images={self.overlay_images} needs overlays=DIR, the folder to write them to")

    def memory_advice(self) -> str:
        return evaluation_memory_advice("batch_size", self.batch_size)


@dataclass
class Prediction(TrainedNetwork):
    """One run of scripts.predict."""

    input: str = MISSING  # an image, or a folder of images, searched with its subfolders
    output: str = MISSING  # folder
