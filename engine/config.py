"""The typed schema of a segmentation run. Hydra validates every file and override against it.

A group with alternatives (norm, body, …) has one dataclass per alternative, found by its `name`, so that an option
which an alternative does not have is an error and not silently ignored. `check` holds the rules across keys.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException


@dataclass
class Norm:
    """Batch normalisation and activation."""

    name: str = MISSING
    activation: str = "leaky_relu"
    activation_param: float = 0.01  # slope of leaky_relu for negative inputs, alpha of elu
    momentum: float = 0.1
    eps: float = 1e-5
    learn_scale: bool = True  # false: gamma is 1


@dataclass
class StandardNorm(Norm):
    name: str = "std"


@dataclass
class InPlaceNorm(Norm):
    name: str = "inplace"  # variant II
    gamma_floor: float = 1e-5  # smallest |gamma| in training


@dataclass
class InPlaceNorm1(InPlaceNorm):
    name: str = "inplace_1"  # variant I


@dataclass
class Body:
    name: str = MISSING
    output_stride: int = 8  # 8, 16 or 32 pixels per feature cell


@dataclass
class ResNeXtBody(Body):
    name: str = "resnext"
    structure: list[int] = field(default_factory=lambda: [3, 4, 23, 3])  # blocks per module
    base_channels: list[int] = field(default_factory=lambda: [128, 128, 256])  # of the first module's bottleneck
    groups: int = 64
    stem_channels: int = 64
    stem: str = "3x3"  # three 3x3 convolutions (the released networks), or one 7x7


@dataclass
class WiderResNetBody(Body):
    name: str = "wider_resnet"
    structure: list[int] = field(default_factory=lambda: [3, 3, 6, 3, 1, 1])  # blocks in mod2 … mod7
    channels: list[list[int]] = MISSING  # of the convolutions of a block, in mod2 … mod7
    stem_channels: int = 64
    downsampling: str = "stride"  # before mod4, mod5, mod6: stride (the A2 variant, for segmentation) or pool (plain)
    dropout: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0, 0.0, 0.3, 0.5])  # in mod2 … mod7


@dataclass
class Head:
    name: str = MISSING


@dataclass
class DeepLabV3Head(Head):
    name: str = "deeplabv3"
    hidden_channels: int = 256
    out_channels: int = 256
    dilations: list[int] = field(default_factory=lambda: [12, 24, 36])
    pooling_size: list[int] | None = None  # sliding pooling window at test time, (height, width) in feature cells


@dataclass
class Data:
    name: str = MISSING  # camvid, cityscapes or synthetic
    root: str | None = None  # the dataset's folder; synthetic writes one into the cache folder where it is null
    train_split: str = "train"
    val_split: str = "val"
    crop_size: int = MISSING  # pixels, square
    crops_per_minibatch: int = MISSING  # the paper's number: global, before it is divided over accumulation steps
    scale: list[float] = field(default_factory=lambda: [0.7, 2.0])
    flip: float = 0.5
    mean: list[float] = field(default_factory=lambda: [0.485, 0.456, 0.406])  # RGB in 0-1, as is std
    std: list[float] = field(default_factory=lambda: [0.229, 0.224, 0.225])
    workers: int = 2  # processes that read and augment
    verify: bool = True  # check every file before the first step; remembered until the files change


@dataclass
class Loss:
    name: str = MISSING


@dataclass
class CrossEntropyLoss(Loss):
    name: str = "cross_entropy"


@dataclass
class BootstrappedLoss(Loss):
    name: str = "bootstrapped"
    fraction: float = 0.25  # share of a crop's pixels that counts: the paper's m


@dataclass
class Optim:
    """SGD with the poly schedule."""

    lr: float = MISSING  # at the first step
    momentum: float = 0.9
    weight_decay: float = 1e-4
    nesterov: bool = False
    power: float = 0.9  # of the poly schedule (1 - step / steps)^power


@dataclass
class Trainer:
    epochs: int | None = None  # length of the run; where steps is given too, the shorter of both
    steps: int | None = None
    evaluate_every_epochs: int | None = None  # the shorter of both; the end of the run is always evaluated
    evaluate_every_steps: int | None = None
    evaluate_images: int | None = None  # evaluate on the first so many images only, also at the end; null: all
    checkpoint_every_steps: int = 500
    log_every_steps: int = 20
    pictures: int = 4  # validation images shown in TensorBoard
    device: str = "auto"  # auto, cpu or cuda
    precision: str = "float32"  # float32 or bfloat16 (autocast)
    channels_last: bool = True
    accumulation_steps: int = 1  # parts in which a minibatch passes through the network


@dataclass
class SegmentationRun:
    """Everything that defines one run of train_seg.py."""

    run_dir: str | None = None  # null: runs/DATASET-NORM/DATE
    resume: str | None = None  # auto: continue the run in run_dir where there is one, else start it
    seed: int = 0
    norm: Norm = MISSING
    body: Body = MISSING
    head: Head = MISSING
    loss: Loss = MISSING
    data: Data = field(default_factory=Data)
    optim: Optim = field(default_factory=Optim)
    trainer: Trainer = field(default_factory=Trainer)


@dataclass
class EvaluationData:
    root: str | None = None  # null: where the network was trained
    split: str | None = None  # null: the validation split of the training


@dataclass
class EvaluationHead:
    pooling_size: list[int] | None = None  # null: as in training


@dataclass
class Evaluation:
    """Everything that defines one run of eval.py; what it does not name comes from the checkpoint."""

    checkpoint: str = MISSING
    data: EvaluationData = field(default_factory=EvaluationData)
    head: EvaluationHead = field(default_factory=EvaluationHead)
    predictions: str | None = None  # folder for predictions in the dataset's official encoding
    overlays: str | None = None  # folder for pictures: image | ground truth | prediction
    overlay_images: int | None = None  # how many of them; null: all
    results: str | None = None  # JSON file; null: in the run's folder
    workers: int = 2
    device: str = "auto"
    precision: str | None = None  # null: as in training


DEVICES = ("auto", "cpu", "cuda")
PRECISIONS = ("float32", "bfloat16")
DATASETS = ("camvid", "cityscapes", "synthetic")

ALTERNATIVES = {
    "norm": {"std": StandardNorm, "inplace_1": InPlaceNorm1, "inplace": InPlaceNorm},
    "body": {"resnext": ResNeXtBody, "wider_resnet": WiderResNetBody},
    "head": {"deeplabv3": DeepLabV3Head},
    "loss": {"cross_entropy": CrossEntropyLoss, "bootstrapped": BootstrappedLoss},
}


def register() -> None:
    """Make the schema known to Hydra, under the names that configs/ refers to."""
    store = ConfigStore.instance()
    store.store(name="segmentation_run", node=SegmentationRun)
    store.store(name="evaluation", node=Evaluation)
    for group, alternatives in ALTERNATIVES.items():
        for name, schema in alternatives.items():
            store.store(group=group, name=f"{name}_schema", node=schema)


def typed(values: DictConfig) -> SegmentationRun | Evaluation:
    """The dataclass instance of a config that Hydra composed, checked.

    Raises:
        ValueError: a value is missing, or values do not go together.
    """
    missing = sorted(OmegaConf.missing_keys(values))
    if missing:
        raise ValueError(f"{missing[0]} has no value: give {missing[0]}=… on the command line")
    config = OmegaConf.to_object(values)
    unknown = flat(OmegaConf.to_container(values)).keys() - flat(plain(config)).keys()
    if unknown:  # Hydra lets +key=… pass
        raise ValueError(f"{sorted(unknown)[0]} is not a key of the configuration; --cfg job prints those that are")
    if isinstance(config, SegmentationRun):
        check(config)
    else:
        check_evaluation(config)
    return config


def from_plain(values: dict) -> SegmentationRun:
    """The run's config from the plain dictionary in a checkpoint: the inverse of `plain`.

    Raises:
        ValueError: a key or value does not fit the schema, as in a checkpoint of another version.
    """
    schema = OmegaConf.structured(SegmentationRun)
    try:
        for group, alternatives in ALTERNATIVES.items():
            schema[group] = OmegaConf.structured(alternatives[values[group]["name"]])
        return OmegaConf.to_object(OmegaConf.merge(schema, values))
    except (OmegaConfBaseException, KeyError, TypeError) as error:
        raise ValueError(f"the checkpoint's configuration does not fit this version of the code: {error}") from error


def plain(config: SegmentationRun | Evaluation) -> dict:
    """The config as nested dictionaries, lists, strings and numbers."""
    return OmegaConf.to_container(OmegaConf.structured(config))


def flat(values: dict, prefix: str = "") -> dict:
    """{"optim": {"lr": 1}} -> {"optim.lr": 1}"""
    leaves = {}
    for key, value in values.items():
        leaves.update(flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value})
    return leaves


def check(config: SegmentationRun) -> None:
    """Rules that one key's type does not express.

    Raises:
        ValueError: names the key, its value, what is expected and how to get it.
    """
    data, trainer, optim, norm = config.data, config.trainer, config.optim, config.norm
    for group, alternatives in ALTERNATIVES.items():
        chosen = getattr(config, group)
        _one_of(f"{group}.name", chosen and chosen.name, alternatives)
        if type(chosen) is not alternatives[chosen.name]:
            raise ValueError(f"{group}.name={chosen.name} does not change the {group}: give {group}={chosen.name}")
    _one_of("data.name", data.name, DATASETS)
    _one_of("trainer.device", trainer.device, DEVICES)
    _one_of("trainer.precision", trainer.precision, PRECISIONS)
    _one_of("body.output_stride", config.body.output_stride, (8, 16, 32))
    _above_zero(
        {
            "data.crop_size": data.crop_size,
            "data.crops_per_minibatch": data.crops_per_minibatch,
            "trainer.accumulation_steps": trainer.accumulation_steps,
            "trainer.checkpoint_every_steps": trainer.checkpoint_every_steps,
            "trainer.log_every_steps": trainer.log_every_steps,
            "trainer.epochs": trainer.epochs,
            "trainer.steps": trainer.steps,
            "trainer.evaluate_every_epochs": trainer.evaluate_every_epochs,
            "trainer.evaluate_every_steps": trainer.evaluate_every_steps,
            "trainer.evaluate_images": trainer.evaluate_images,
            "optim.lr": optim.lr,
            "norm.eps": norm.eps,
            "norm.momentum": norm.momentum,
        }
    )
    for group in ("body", "head"):  # structures, channels, groups, dilations
        integers = {f"{group}.{key}": value for key, value in vars(getattr(config, group)).items() if key != "dropout"}
        _above_zero({key: value for key, value in integers.items() if not isinstance(value, str)})
    _at_least_zero(
        {
            "data.workers": data.workers,
            "trainer.pictures": trainer.pictures,
            "optim.momentum": optim.momentum,
            "optim.weight_decay": optim.weight_decay,
            "optim.power": optim.power,
            "seed": config.seed,
        }
    )
    if norm.momentum > 1:
        raise ValueError(f"norm.momentum={norm.momentum}: expected the weight of the new minibatch, at most 1")
    if trainer.epochs is None and trainer.steps is None:
        raise ValueError("trainer.epochs and trainer.steps are both null: give one of them as the length of the run")
    crops, parts = data.crops_per_minibatch, trainer.accumulation_steps
    if crops % parts:
        raise ValueError(
            f"data.crops_per_minibatch={crops} cannot be divided over trainer.accumulation_steps={parts}: expected a "
            f"multiple of {parts}"
        )
    if crops // parts < 2:
        raise ValueError(
            f"data.crops_per_minibatch={crops} over trainer.accumulation_steps={parts} gives one crop at a time, and "
            f"the pooled branch of the head cannot normalise a single value per channel: use at least {2 * parts} crops"
        )
    for key, values in (("data.mean", data.mean), ("data.std", data.std)):
        if len(values) != 3:
            raise ValueError(f"{key}={values}: expected three numbers, for red, green and blue")
    _above_zero({"data.std": data.std, "data.scale": data.scale})
    if len(data.scale) != 2:
        raise ValueError(f"data.scale={data.scale}: expected two numbers, the lowest and the highest factor")


def check_evaluation(config: Evaluation) -> None:
    """As `check`, for an evaluation."""
    _one_of("device", config.device, DEVICES)
    if config.precision is not None:
        _one_of("precision", config.precision, PRECISIONS)
    _above_zero({"overlay_images": config.overlay_images, "head.pooling_size": config.head.pooling_size})
    _at_least_zero({"workers": config.workers})


def _one_of(key: str, value, allowed) -> None:
    if value not in allowed:
        raise ValueError(f"{key}={value}: expected one of {', '.join(map(str, allowed))}")


def _above_zero(values: dict) -> None:
    """For numbers and (nested) lists of them; None passes, NaN and empty lists do not."""
    for key, value in values.items():
        if value is not None and not _all(lambda number: number > 0, value):
            raise ValueError(f"{key}={value}: expected a number above 0")


def _at_least_zero(values: dict) -> None:
    for key, value in values.items():
        if not value >= 0:
            raise ValueError(f"{key}={value}: expected 0 or more")


def _all(holds: Callable[[float], bool], value) -> bool:
    if isinstance(value, list):
        return len(value) > 0 and all(_all(holds, entry) for entry in value)
    return holds(value) and math.isfinite(value)
