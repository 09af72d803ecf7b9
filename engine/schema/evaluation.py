"""Keys of eval.py and scripts.predict."""

from dataclasses import dataclass, field, fields
from pathlib import Path

from omegaconf import MISSING

from engine.schema.keys import key
from engine.schema.network import PackageNorm, StandardNorm
from engine.schema.training import DEVICES, PRECISIONS, TrainingRun
from models.layers.norms.activations import ACTIVATIONS

OVERLAP = 0.25
ACTIVATION_PARAMS = {"leaky_relu": 0.01, "elu": 1.0}  # slope for negative inputs, alpha
VIEWS, TEN = ("center", "ten_crop"), 10
SEGMENTATION, CLASSIFICATION = "segmentation", "classification"  # tasks


@dataclass
class TrainedData:
    base_size: int | None = key(None, above=0, task=SEGMENTATION)  # null: as in training
    antialias: bool | None = key(None, task=SEGMENTATION)  # null: as in training


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
    head: TrainedHead = key(TrainedHead(), task=SEGMENTATION)
    window: Window = key(Window(), task=SEGMENTATION)
    tta: TestTimeAugmentation = key(TestTimeAugmentation(), task=SEGMENTATION)
    device: str = key("auto", one_of=DEVICES)
    precision: str | None = key(None, one_of=PRECISIONS)  # null: as in training
    timeout_seconds: int | None = key(None, above=0)  # how long to wait for the next image; null: as in training
    data: TrainedData = field(default_factory=TrainedData)

    def apply_to(self, config: TrainingRun) -> None:
        """Override the training's keys by those given here. ValueError if they do not fit the network."""
        config.trainer.precision = self.precision or config.trainer.precision
        config.data.timeout_seconds = self.timeout_seconds or config.data.timeout_seconds
        config.check_precision()
        config.apply_options(self)


@dataclass
class Evaluation(TrainedNetwork):
    """One run of eval.py."""

    data: EvaluationData = field(default_factory=EvaluationData)
    # Replaces the activation of every norm (paper, Table 1), with its default parameter; null: as in training.
    activation: str | None = key(None, one_of=tuple(ACTIVATIONS))
    # The crops whose logits are averaged: the central one; or the corners and the centre, and their mirror images.
    view: str = key("center", one_of=VIEWS, task=CLASSIFICATION)
    crop: int | None = key(None, above=0, task=CLASSIFICATION)  # pixels; null: as in training
    # Pixels of the short side before cropping; null: in proportion to crop as in training, e.g. 366 for 320.
    resize: int | None = key(None, above=0, task=CLASSIFICATION)
    predictions: str | None = key(None, task=SEGMENTATION)  # folder for predictions in the dataset's official encoding
    overlays: str | None = key(None, task=SEGMENTATION)  # folder for pictures: image | ground truth | prediction
    overlay_images: int | None = key(None, above=0, task=SEGMENTATION)  # how many; null: all
    results: str | None = None  # JSON file; null: in the run's folder
    workers: int = key(2, least=0)  # processes that read
    # Most images predicted at once; null: one (segmentation, where only images of equal size can be), or as in training
    # (classification; with ten crops of each, a tenth).
    batch_size: int | None = key(None, above=0)

    def check(self) -> None:
        if self.overlay_images is not None and self.overlays is None:
            raise ValueError(f"overlay_images={self.overlay_images} needs overlays=DIR, the folder to write them to")

    def apply_to(self, config: TrainingRun) -> None:
        super().apply_to(config)
        config.trainer.evaluate_images = None
        if self.activation is not None:
            self._swap_activation(config)

    def _swap_activation(self, config: TrainingRun) -> None:
        """In evaluation every norm but the package's is the standard one of the same weights, with any activation."""
        norm = config.norm
        if isinstance(norm, PackageNorm):
            raise ValueError(
                f"activation={self.activation} with a network trained with norm=package: the released layers fix their "
                f"activation; a network trained with norm=inplace can be evaluated with another"
            )
        kept = {entry.name: getattr(norm, entry.name) for entry in fields(StandardNorm)}
        if self.activation != norm.activation:
            kept["activation_param"] = ACTIVATION_PARAMS.get(str(self.activation), norm.activation_param)
        config.norm = StandardNorm(**{**kept, "name": "std", "activation": self.activation})

    def default_results_file(self, config: TrainingRun) -> Path:
        """RUN_DIR/results.json for the last checkpoint evaluated as in training; other names say what differs."""
        path, data = Path(self.checkpoint), config.data
        words = [path.stem] if path.stem != "last" else []
        if self.data.split not in (None, data.val_split):
            words.append(str(self.data.split))
        trained_on = None if data.root is None else _folder(data.root)
        if self.data.root is not None and _folder(self.data.root) != trained_on:
            words.append(_folder(self.data.root).name)
        words += config.evaluation_words(self)
        if self.precision not in (None, config.trainer.precision):
            words.append(str(self.precision))
        if self.activation not in (None, config.norm.activation):
            words.append(str(self.activation))
        words += ["trained"] if not self.averaged else []
        words += self._view_words()
        folder = path.parent.parent if path.parent.name == "checkpoints" else path.parent
        return folder / f"{'_'.join(['results', *words])}.json"

    def _view_words(self) -> list[str]:
        """How the views differ from a whole image, or a central crop, at a single scale."""
        words = [f"window{self.window.size}"] if self.window.size else []
        if self.window.overlap != OVERLAP:
            words.append(f"overlap{self.window.overlap:g}")
        if self.tta.scales != [1.0]:
            words.append("scales" + "-".join(f"{scale:g}" for scale in self.tta.scales))
        words += ["flip"] if self.tta.flip else []
        words += [self.view] if self.view != "center" else []
        words += [f"crop{self.crop}"] if self.crop is not None else []
        return [*words, f"resize{self.resize}"] if self.resize is not None else words


@dataclass
class Prediction(TrainedNetwork):
    """One run of scripts.predict."""

    input: str = MISSING  # an image, or a folder of images, searched with its subfolders
    output: str = MISSING  # folder


def _folder(path: str) -> Path:
    return Path(path).expanduser().resolve()
