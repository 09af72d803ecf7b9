"""The typed schema of a segmentation run. Hydra validates every file and override against it.

A group with alternatives (norm, body, …) has one dataclass per alternative, found by its `name`, so that an option
which an alternative does not have is an error and not silently ignored. A key's bounds stand beside it; `check` holds
the rules across keys.
"""

import math
from copy import deepcopy
from dataclasses import dataclass, field, fields, is_dataclass

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

DATASETS = ("camvid", "cityscapes", "synthetic")
DEVICES = ("auto", "cpu", "cuda")
PRECISIONS = ("float32", "bfloat16")


def key(default, *, above: float | None = None, least: float | None = None, one_of: tuple | None = None):
    """A key with a default and bounds, which hold for every number of a list; None (null) is always allowed."""
    bounds = {"above": above, "least": least, "one_of": one_of}
    return field(default_factory=lambda: deepcopy(default), metadata=bounds)


@dataclass
class Norm:
    """Batch normalisation and activation."""

    name: str = MISSING
    activation: str = "leaky_relu"
    activation_param: float = 0.01  # slope of leaky_relu for negative inputs, alpha of elu
    momentum: float = key(0.1, above=0)
    eps: float = key(1e-5, above=0)
    learn_scale: bool = True  # false: gamma is 1


@dataclass
class StandardNorm(Norm):
    name: str = "std"


@dataclass
class InPlaceNorm(Norm):
    name: str = "inplace"  # variant II
    gamma_floor: float = key(1e-5, above=0)  # smallest |gamma| in training


@dataclass
class InPlaceNorm1(InPlaceNorm):
    name: str = "inplace_1"  # variant I


@dataclass
class Body:
    name: str = MISSING
    output_stride: int = key(8, one_of=(8, 16, 32))  # pixels per feature cell


@dataclass
class ResNeXtBody(Body):
    name: str = "resnext"
    structure: list[int] = key([3, 4, 23, 3], above=0)  # blocks per module
    base_channels: list[int] = key([128, 128, 256], above=0)  # of the first module's bottleneck
    groups: int = key(64, above=0)
    stem_channels: int = key(64, above=0)
    stem: str = "3x3"  # three 3x3 convolutions (the released networks), or one 7x7


@dataclass
class WiderResNetBody(Body):
    name: str = "wider_resnet"
    structure: list[int] = key([3, 3, 6, 3, 1, 1], above=0)  # blocks in mod2 … mod7
    channels: list[list[int]] = key(MISSING, above=0)  # of the convolutions of a block, in mod2 … mod7
    stem_channels: int = key(64, above=0)
    downsampling: str = "stride"  # before mod4, mod5, mod6: stride (the A2 variant, for segmentation) or pool (plain)
    dropout: list[float] = key([0.0, 0.0, 0.0, 0.0, 0.3, 0.5], least=0)  # in mod2 … mod7


@dataclass
class Head:
    name: str = MISSING


@dataclass
class DeepLabV3Head(Head):
    name: str = "deeplabv3"
    hidden_channels: int = key(256, above=0)
    out_channels: int = key(256, above=0)
    dilations: list[int] = key([12, 24, 36], above=0)
    # Sliding pooling window at test time, (height, width) in feature cells.
    pooling_size: list[int] | None = key(None, above=0)


@dataclass
class Data:
    name: str = key(MISSING, one_of=DATASETS)
    root: str | None = None  # the dataset's folder; synthetic writes one into the cache folder where it is null
    train_split: str = "train"
    val_split: str = "val"
    crop_size: int = key(MISSING, above=0)  # pixels, square
    # The paper's number: global, before it is divided over accumulation steps.
    crops_per_minibatch: int = key(MISSING, above=0)
    scale: list[float] = key([0.7, 2.0], above=0)
    flip: float = key(0.5, least=0)
    mean: list[float] = key([0.485, 0.456, 0.406], least=0)  # RGB in 0-1, as is std
    std: list[float] = key([0.229, 0.224, 0.225], above=0)
    workers: int = key(2, least=0)  # processes that read and augment
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
    fraction: float = key(0.25, above=0)  # share of a crop's pixels that counts: the paper's m


@dataclass
class Optim:
    """SGD with the poly schedule."""

    lr: float = key(MISSING, above=0)  # at the first step
    momentum: float = key(0.9, least=0)
    weight_decay: float = key(1e-4, least=0)
    nesterov: bool = False
    power: float = key(0.9, least=0)  # of the poly schedule (1 - step / steps)^power


@dataclass
class Trainer:
    # Durations are given in epochs or steps; where both are given, the shorter one counts.
    epochs: int | None = key(None, above=0)
    steps: int | None = key(None, above=0)
    evaluate_every_epochs: int | None = key(None, above=0)  # the end of the run is always evaluated
    evaluate_every_steps: int | None = key(None, above=0)
    evaluate_images: int | None = key(None, above=0)  # evaluate on the first so many only, also at the end; null: all
    checkpoint_every_steps: int = key(500, above=0)
    log_every_steps: int = key(20, above=0)
    pictures: int = key(4, least=0)  # validation images shown in TensorBoard
    device: str = key("auto", one_of=DEVICES)
    precision: str = key("float32", one_of=PRECISIONS)  # bfloat16: by autocast
    channels_last: bool = True
    accumulation_steps: int = key(1, above=0)  # parts in which a minibatch passes through the network


@dataclass
class SegmentationRun:
    """Everything that defines one run of train_seg.py."""

    run_dir: str | None = None  # null: runs/DATASET-NORM/DATE
    resume: str | None = None  # auto: continue the run in run_dir where there is one, else start it
    seed: int = key(0, least=0)
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
    pooling_size: list[int] | None = key(None, above=0)  # null: as in training


@dataclass
class Evaluation:
    """Everything that defines one run of eval.py; what it does not name comes from the checkpoint."""

    checkpoint: str = MISSING
    data: EvaluationData = field(default_factory=EvaluationData)
    head: EvaluationHead = field(default_factory=EvaluationHead)
    predictions: str | None = None  # folder for predictions in the dataset's official encoding
    overlays: str | None = None  # folder for pictures: image | ground truth | prediction
    overlay_images: int | None = key(None, above=0)  # how many of them; null: all
    results: str | None = None  # JSON file; null: in the run's folder
    workers: int = key(2, least=0)
    device: str = key("auto", one_of=DEVICES)
    precision: str | None = key(None, one_of=PRECISIONS)  # null: as in training


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
    _check_bounds(config)
    if isinstance(config, SegmentationRun):
        check(config)
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
    for group, alternatives in ALTERNATIVES.items():
        chosen = getattr(config, group)
        name = chosen and chosen.name
        if name not in alternatives:
            raise ValueError(f"{group}.name={name}: expected one of {', '.join(alternatives)}")
        if type(chosen) is not alternatives[name]:
            raise ValueError(f"{group}.name={name} does not change the {group}: give {group}={name}")
    data, trainer = config.data, config.trainer
    if config.norm.momentum > 1:
        raise ValueError(f"norm.momentum={config.norm.momentum}: expected the weight of the new minibatch, at most 1")
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
    for name, values, count in (("mean", data.mean, 3), ("std", data.std, 3), ("scale", data.scale, 2)):
        if len(values) != count:
            meaning = "red, green and blue" if count == 3 else "the lowest and the highest factor"
            raise ValueError(f"data.{name}={values}: expected {count} numbers, {meaning}")


def _check_bounds(config, prefix: str = "") -> None:
    for entry in fields(config):
        value = getattr(config, entry.name)
        if is_dataclass(value):
            _check_bounds(value, f"{prefix}{entry.name}.")
            continue
        above, least, one_of = (entry.metadata.get(bound) for bound in ("above", "least", "one_of"))
        if value is None:
            continue
        if one_of is not None and value not in one_of:
            raise ValueError(f"{prefix}{entry.name}={value}: expected one of {', '.join(map(str, one_of))}")
        # Written so that NaN fails; an empty list does not express anything either.
        if above is not None and not all(above < number < math.inf for number in _numbers(value) or [above]):
            raise ValueError(f"{prefix}{entry.name}={value}: expected a number above {above}")
        if least is not None and not all(least <= number < math.inf for number in _numbers(value) or [math.nan]):
            raise ValueError(f"{prefix}{entry.name}={value}: expected {least} or more")


def _numbers(value) -> list[float]:
    if isinstance(value, list):
        return [number for entry in value for number in _numbers(entry)]
    return [value]
