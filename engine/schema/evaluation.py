"""Keys of eval.py and scripts.predict."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from omegaconf import MISSING

from datasets.class_names import ORDERS
from engine.schema.additions import Plugins, Score
from engine.schema.keys import MOST_SECONDS, MOST_WORKERS, key, several
from engine.schema.network import Norm, OurNorm, StandardNorm
from engine.schema.training import DEVICES, PRECISIONS, TrainingRun
from keepless.norms import ACTIVATIONS
from models.segmentation import EXACT, UPSAMPLINGS

OVERLAP = 0.25
ACTIVATION_PARAMS = {"leaky_relu": 0.01, "elu": 1.0}  # slope for negative inputs, alpha
CENTER = "center"
TEN_CROP = "ten_crop"
TEN = 10
SEGMENTATION = "segmentation"
CLASSIFICATION = "classification"
NETWORK = ("norm", "body", "head")  # groups that a trained network is built of


@dataclass
class TrainedData:
    base_size: int | None = key(None, above=0, task=SEGMENTATION)  # null: as in training
    antialias: bool | None = key(None, task=SEGMENTATION)  # null: as in training


@dataclass
class EvaluationData(TrainedData):
    root: str | None = None  # null: as in training
    split: str | None = None  # null: the validation split in training
    # How class folders are sorted, see train_imagenet.py; null: as in training.
    class_order: str | None = key(None, one_of=ORDERS, task=CLASSIFICATION)


@dataclass
class TrainedHead:
    # null: as in training
    pooling_size: list[int] | None = key(None, above=0, entries=("height", "width in feature cells"), task=SEGMENTATION)


@dataclass
class Window:
    """Larger images are evaluated in overlapping squares, to limit memory."""

    # Side in pixels, a multiple of body.output_stride; null: whole images.
    size: int | None = key(None, above=0, task=SEGMENTATION)
    # The smallest fraction of a side by which neighbours overlap.
    overlap: float = key(OVERLAP, least=0, most=0.9, task=SEGMENTATION)

    def check(self) -> None:
        if self.size is None and self.overlap != OVERLAP:
            raise ValueError(f"window.overlap={self.overlap} needs window.size=PIXELS, the side of the windows")


@dataclass
class TestTimeAugmentation:
    """Average the softmax over several views of each image."""

    scales: list[float] = key([1.0], above=0, task=SEGMENTATION)  # 1 is data.base_size
    flip: bool = key(False, task=SEGMENTATION)  # also mirror each scale left to right


@dataclass
class TrainedNetwork(Plugins):
    """A checkpoint, and how its network predicts."""

    checkpoint: str = MISSING  # file, or a run directory, whose last checkpoint is used
    averaged: bool = True  # the EMA weights, if the checkpoint has them
    head: TrainedHead = field(default_factory=TrainedHead)
    window: Window = field(default_factory=Window)
    tta: TestTimeAugmentation = field(default_factory=TestTimeAugmentation)
    # The crops whose logits are averaged: the central one; or the corners and the centre, and their mirror images.
    view: str = key(CENTER, one_of=(CENTER, TEN_CROP), task=CLASSIFICATION)
    crop: int | None = key(None, above=0, task=CLASSIFICATION)  # pixels; null: as in training
    # Pixels of the short side before cropping; null: in proportion to crop as in training, e.g. 366 for 320.
    resize: int | None = key(None, above=0, task=CLASSIFICATION)
    device: str = key("auto", one_of=DEVICES)  # auto: CUDA if there is a device
    precision: str | None = key(None, one_of=PRECISIONS)  # null: as in training
    data: TrainedData = field(default_factory=TrainedData)

    needed: ClassVar[tuple[str, ...]] = NETWORK  # groups of the training whose choices the command builds

    def apply_to(self, config: TrainingRun) -> None:
        """Override the training's keys by those given here. ValueError if they do not fit the network or its data."""
        for group in ("data", "head"):
            choice: Any = getattr(config, group, None)
            for name, value in vars(getattr(self, group)).items():
                if value in (None, "") or name == "split":  # a training has two splits
                    continue
                if not hasattr(choice, name):
                    raise ValueError(f"{group}.{name}={value}: {group}={choice.name} has no such key; leave it out")
                setattr(choice, name, value)
        config.trainer.precision = self.precision or config.trainer.precision
        config.check_precision()
        config.apply_options(self)


@dataclass
class Evaluation(TrainedNetwork):
    """One run of eval.py."""

    needed: ClassVar[tuple[str, ...]] = (*NETWORK, "data")
    data: EvaluationData = field(default_factory=EvaluationData)
    # Replaces the activation of every norm (paper, Table 1), with its default parameter; null: as in training.
    activation: str | None = key(None, one_of=tuple(ACTIVATIONS))
    # exact: a feature cell covers body.output_stride pixels; stretched: all are stretched to the image, as released.
    upsampling: str = key(EXACT, one_of=UPSAMPLINGS, task=SEGMENTATION)
    # Folder for predictions in the dataset's official encoding.
    predictions: str | None = key(None, task=SEGMENTATION, written=True)
    # Folder for pictures: image | ground truth | prediction.
    overlays: str | None = key(None, task=SEGMENTATION, written=True)
    # CSV file: each image's name and mIoU, the IoU of each class in it, and the pixels from which these are computed.
    per_image: str | None = key(None, task=SEGMENTATION, written=True)
    results: str | None = key(None, written=True)  # JSON file; null: in the run's folder
    # Processes that read, for each process that evaluates. auto: one per core that the machine has for it, at most 8.
    workers: Any = key("auto", word="auto", least=0, most=MOST_WORKERS)
    # How long to wait for the next image of these processes; null: as in training.
    timeout_seconds: int | None = key(None, above=0, most=MOST_SECONDS)
    # Images at once; null: as in training, or a tenth of that with view=ten_crop. auto: in segmentation on CUDA as many
    # images of one size, or windows, as have the pixels of a micro-batch of the training, otherwise like null or 1.
    batch_size: Any = key(None, word="auto", least=1)
    scores: dict[str, Score] = several()  # to add to those of the training: [NAME,NAME]

    def apply_to(self, config: TrainingRun) -> None:
        config.data.timeout_seconds = self.timeout_seconds or config.data.timeout_seconds
        super().apply_to(config)
        config.trainer.evaluate_images = None
        config.scores = config.scores | self.scores
        if self.activation is not None:
            config.norm = self._norm_with_activation(config.norm)

    def _norm_with_activation(self, norm: Norm) -> StandardNorm:
        """The standard norm with `activation`, equal in evaluation to each norm of ours. ValueError: it is not ours."""
        if not isinstance(norm, OurNorm):
            raise ValueError(
                f"activation={self.activation} with a network trained with norm={norm.name}, which fixes its "
                f"activation; a network trained with norm=inplace can be evaluated with another"
            )
        parameter = norm.activation_param
        if self.activation != norm.activation:
            parameter = ACTIVATION_PARAMS.get(str(self.activation), parameter)
        return norm.as_kind(StandardNorm, activation=self.activation, activation_param=parameter)

    def default_results_file(self, config: TrainingRun, step: int | None = None) -> Path:
        """RUN_DIR/results.json for the last checkpoint evaluated as in training; other names say what differs.

        `step`: of a checkpoint whose run has not ended. With `trainer.evaluate_images`, results.json holds the scores
        of those images only.
        """
        path = Path(self.checkpoint)
        data = config.data
        smoothing = "antialiased" if self.data.antialias else "aliased"
        pooling = self.head.pooling_size
        words = [
            *if_changed(path.stem, "last"),
            *if_changed(step if path.stem == "last" else None, None, "step{}"),
            *([] if config.trainer.evaluate_images is None else ["all_images"]),
            *if_changed(self.data.split, data.val_split),
            *if_changed(absolute(self.data.root), absolute(data.root), "{0.name}"),
            *if_changed(self.data.base_size, getattr(data, "base_size", None), "base{}"),
            *if_changed(self.data.antialias, getattr(data, "antialias", None), smoothing),
            *if_changed(pooling, getattr(getattr(config, "head", None), "pooling_size", None), "pooling{0[0]}x{0[1]}"),
            *if_changed(self.data.class_order, getattr(data, "class_order", None)),
            *if_changed(self.precision, config.trainer.precision),
            *if_changed(self.activation, config.norm.activation),
            *if_changed(self.upsampling, EXACT),
            *if_changed(self.averaged, True, "trained"),
            *if_changed(self.window.size, None, "window{}"),
            *if_changed(self.window.overlap, OVERLAP, "overlap{:g}"),
            *if_changed(self.tta.scales, [1.0], "scales" + "-".join(f"{scale:g}" for scale in self.tta.scales)),
            *if_changed(self.tta.flip, False, "flip"),
            *if_changed(self.view, "center"),
            *if_changed(self.crop, None, "crop{}"),
            *if_changed(self.resize, None, "resize{}"),
            *self.scores,
            *(f"without_{name}" for name, choice in config.scores.items() if choice.is_absent),
        ]
        folder = path.parent.parent if path.parent.name == "checkpoints" else path.parent
        return folder / f"{'_'.join(['results', *words]).replace('/', '-')}.json"  # splits may be paths


def if_changed(value: object, usual: object, word: str = "{}") -> list[str]:
    """The word, with the value filled in, if a key is given and differs from its usual value."""
    return [] if value in (None, usual) else [word.format(value)]


@dataclass
class Prediction(TrainedNetwork):
    """One run of scripts.predict."""

    input: str = MISSING  # an image, or a folder of images, searched with its subfolders
    output: str = key(MISSING, written=True)  # folder
    # HTML file: each image with its overlay and the share of each class, or its top_k bars.
    report: str | None = key(None, written=True)
    # Also write each pixel's probability of every class: float16 (classes, height, width), as NumPy files.
    probabilities: bool = key(False, task=SEGMENTATION)
    top_k: int = key(5, above=0, task=CLASSIFICATION)  # classes of each image in predictions.csv, the likeliest first

    def apply_to(self, config: TrainingRun) -> None:
        super().apply_to(config)
        config.norm = config.norm.eager()  # compiled code would be for one image size


def absolute(path: str | None) -> Path | None:
    """An absolute path without links and "..", so that equal folders are equal paths."""
    return None if path is None else Path(path).resolve()
