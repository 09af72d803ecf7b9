"""Keys of eval.py and scripts.predict: a checkpoint, and how its network predicts."""

from dataclasses import dataclass, field

from omegaconf import MISSING

from engine.schema.keys import key
from engine.schema.segmentation import SegmentationRun
from engine.schema.training import DEVICES, PRECISIONS

OVERLAP = 0.25
# For the message of an image that does not fit into memory, also in a training.
MEMORY_ADVICE = (
    "eval.py and scripts.predict need less with window.size=1024 or smaller, also for the checkpoints of a training "
    "that stops here; a training itself with a smaller data.base_size, or trainer.precision=bfloat16 if it is not used "
    "yet"
)


@dataclass
class TrainedData:
    base_size: int | None = key(None, above=0)  # null: as in training


@dataclass
class EvaluationData(TrainedData):
    root: str | None = None  # null: where the network was trained
    split: str | None = None  # null: the validation split of the training


@dataclass
class TrainedHead:
    # null: as in training
    pooling_size: list[int] | None = key(None, above=0, entries=("height", "width in feature cells"))


@dataclass
class Window:
    """Larger images are seen in overlapping squares, so that memory does not grow with the image."""

    size: int | None = key(None, above=0)  # pixels of a side, a multiple of body.output_stride; null: whole images
    overlap: float = key(OVERLAP, least=0, most=0.9)  # least share of a side that neighbours have in common

    def check(self) -> None:
        if self.size is None and self.overlap != OVERLAP:
            raise ValueError(f"window.overlap={self.overlap} needs window.size=PIXELS, the side of the windows")


@dataclass
class TestTimeAugmentation:
    """Views of every image, whose softmax is averaged."""

    scales: list[float] = key([1.0], above=0)  # 1 is data.base_size
    flip: bool = False  # each scale also mirrored left to right


@dataclass
class TrainedNetwork:
    """A checkpoint and how it predicts; keys that are not given are as in the checkpoint."""

    checkpoint: str = MISSING
    averaged: bool = True  # the averaged weights, if the checkpoint has them
    head: TrainedHead = field(default_factory=TrainedHead)
    window: Window = field(default_factory=Window)
    tta: TestTimeAugmentation = field(default_factory=TestTimeAugmentation)
    device: str = key("auto", one_of=DEVICES)
    precision: str | None = key(None, one_of=PRECISIONS)  # null: as in training

    def apply_to(self, config: SegmentationRun) -> None:
        """Override keys of the training with the keys given here. ValueError if the network cannot do that."""
        config.data.base_size = self.data.base_size or config.data.base_size
        config.head.pooling_size = self.head.pooling_size or config.head.pooling_size
        config.trainer.precision = self.precision or config.trainer.precision
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
    overlay_images: int | None = key(None, above=0)  # how many of them; null: all
    results: str | None = None  # JSON file; null: in the run's folder
    workers: int = key(2, least=0)  # processes that read
    timeout_seconds: int | None = key(None, above=0)  # for an image from the workers; null: as in training

    def check(self) -> None:
        if self.overlay_images is not None and self.overlays is None:
            raise ValueError(f"overlay_images={self.overlay_images} needs overlays=DIR, the folder to write them to")


@dataclass
class Prediction(TrainedNetwork):
    """One run of scripts.predict."""

    data: TrainedData = field(default_factory=TrainedData)
    input: str = MISSING  # an image, or a folder: its PNG and JPEG files are predicted, also in its subfolders
    output: str = MISSING  # folder
