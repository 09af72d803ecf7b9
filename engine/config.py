"""From what Hydra composes to checked, plain Python objects of `engine.schema`, and to dictionaries and back."""

import math
import re
from dataclasses import fields, is_dataclass

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.types import Quote, QuotedString
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from engine.schema import (
    ALTERNATIVES,
    Data,
    Evaluation,
    PackageNorm,
    Prediction,
    SegmentationRun,
    TrainedNetwork,
    Window,
)
from models.package import PACKAGE_ACTIVATIONS


def register() -> None:
    """Make the schema known to Hydra, under the names that configs/ refers to."""
    store = ConfigStore.instance()
    store.store(name="segmentation_run", node=SegmentationRun)
    store.store(name="evaluation", node=Evaluation)
    store.store(name="prediction", node=Prediction)
    for group, alternatives in ALTERNATIVES.items():
        for name, schema in alternatives.items():
            store.store(group=group, name=f"{name}_schema", node=schema)


def typed(values: DictConfig) -> SegmentationRun | Evaluation | Prediction:
    """The dataclass instance of a config that Hydra composed, checked.

    Raises:
        ValueError: a value is missing, or values do not go together.
    """
    config = within_bounds(values)
    _check_length("head.pooling_size", config.head and config.head.pooling_size, 2, "(height, width) in feature cells")
    if isinstance(config, SegmentationRun):
        check(config)
        return config
    if isinstance(config, Evaluation) and config.overlay_images is not None and config.overlays is None:
        raise ValueError(f"overlay_images={config.overlay_images} needs overlays=DIR, the folder to write them to")
    if config.window.size is None and config.window.overlap != Window().overlap:
        raise ValueError(f"window.overlap={config.window.overlap} needs window.size=PIXELS, the side of the windows")
    return config


def override(config: SegmentationRun, options: TrainedNetwork) -> None:
    """Put what the command names in place of what the training had. ValueError where the network cannot do that."""
    config.data.base_size = options.data.base_size or config.data.base_size
    config.head.pooling_size = options.head.pooling_size or config.head.pooling_size
    config.trainer.precision = options.precision or config.trainer.precision
    check_package(config)
    size, stride = options.window.size, config.body.output_stride
    if size is not None and size % stride:
        raise ValueError(
            f"window.size={size}: expected a multiple of the network's output stride {stride}, such as "
            f"{-(-size // stride) * stride}"
        )


def within_bounds(values: DictConfig):
    """The instance of any schema, with every key known, given and within its bounds; else ValueError names the key."""
    missing = sorted(OmegaConf.missing_keys(values))
    if missing:
        raise ValueError(f"{missing[0]} has no value: give {missing[0]}=… on the command line")
    config = OmegaConf.to_object(values)
    unknown = flat(OmegaConf.to_container(values)).keys() - flat(plain(config)).keys()
    if unknown:  # Hydra lets +key=… pass
        raise ValueError(f"{sorted(unknown)[0]} is not a key of the configuration; --cfg job prints those that are")
    _check_bounds(config)
    return config


def from_plain(values: dict, source: str = "the checkpoint") -> SegmentationRun:
    """The run's config from the plain dictionary in a checkpoint: the inverse of `plain`.

    Groups that are younger than the checkpoint have the choice that was the only one before. Bounds are checked of what
    matters to an evaluation, too; a training compares all with the command's.

    Raises:
        ValueError: a key or value does not fit the schema, as in a checkpoint of another version. Names `source`.
    """
    schema = OmegaConf.structured(SegmentationRun)
    values = {"sampler": {"name": "uniform"}, **values}
    try:
        for group in ALTERNATIVES:
            chosen = values.get(group)
            name = chosen.get("name") if isinstance(chosen, dict) else None
            schema[group] = OmegaConf.structured(_alternative(group, name))
        config = OmegaConf.to_object(OmegaConf.merge(schema, values))
        for group in ("norm", "body", "head", "data", "trainer"):
            _check_bounds(getattr(config, group), f"{group}.")
        _check_length("head.pooling_size", config.head.pooling_size, 2, "(height, width) in feature cells")
        _check_data(config.data)
    except (OmegaConfBaseException, TypeError, ValueError) as error:
        raise ValueError(f"{source}: its configuration does not fit this version of the code: {error}") from error
    return config


def plain(config: SegmentationRun | Evaluation) -> dict:
    """The config as nested dictionaries, lists, strings and numbers."""
    return OmegaConf.to_container(OmegaConf.structured(config))


def flat(values: dict, prefix: str = "") -> dict:
    """{"optim": {"lr": 1}} -> {"optim.lr": 1}"""
    leaves = {}
    for key, value in values.items():
        leaves.update(flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value})
    return leaves


def assignment(key: str, path: object) -> str:
    """`key=path` as Hydra must be given it, with the quotes that some characters need. A shell's come on top."""
    text = str(path)
    if not re.fullmatch(r"[\w.+-]*(/[\w.+-]+)+", text, re.ASCII):
        text = re.sub(r"(\\*)\$\{", r"\1\1\\${", text)  # else an interpolation
        text = QuotedString(text, Quote.double).with_quotes()
    return f"{key}={text}"


def check(config: SegmentationRun) -> None:
    """Rules that one key's type does not express.

    Raises:
        ValueError: names the key, its value, what is expected and how to get it.
    """
    for group in ALTERNATIVES:
        chosen = getattr(config, group)
        name = chosen and chosen.name
        if type(chosen) is not _alternative(group, name):
            raise ValueError(f"{group}.name={name} does not change the {group}: give {group}={name}")
    trainer = config.trainer
    check_package(config)
    if trainer.epochs is None and trainer.steps is None:
        raise ValueError("trainer.epochs and trainer.steps are both null: give one of them as the length of the run")
    check_shares(config, processes=1)
    if trainer.ema_decay == 1:
        raise ValueError("trainer.ema_decay=1 keeps the weights of the first step; give less, such as 0.999")
    if trainer.ema_statistics_minibatches and trainer.ema_decay is None:
        raise ValueError(
            f"trainer.ema_statistics_minibatches={trainer.ema_statistics_minibatches} is for averaged weights: give "
            f"trainer.ema_decay as well, such as 0.999"
        )
    if trainer.compile and isinstance(config.norm, PackageNorm):
        raise ValueError(
            "trainer.compile=true with norm=package: the released layer cannot be compiled; use norm=inplace"
        )
    _check_data(config.data)
    init = config.init
    for name, value, default in (("format", init.format, None), ("part", init.part, "network")):
        if value != default and init.weights is None:
            raise ValueError(f"init.{name}={value} needs init.weights=FILE, the weights to start from")
    if config.resume is not None and config.run_dir is None:
        raise ValueError(f"resume={config.resume} needs run_dir=…, the folder of the run to continue")


def check_shares(config: SegmentationRun, processes: int) -> None:
    """Raise ValueError where a process would have a single crop at a time.

    The head's pooled branch has one value per crop and channel, and a single value has no variance.
    """
    crops, parts = config.data.crops_per_minibatch, config.trainer.accumulation_steps
    at_a_time = crops // (processes * parts)
    if at_a_time < 2:
        over = f" over {processes} processes" if processes > 1 else ""
        over += f" over trainer.accumulation_steps={parts}" if parts > 1 else ""
        raise ValueError(
            f"data.crops_per_minibatch={crops}{over} gives {at_a_time} crop(s) at a time, and the pooled branch of the "
            f"head cannot normalise a single value per channel: use at least {2 * processes * parts} crops"
        )


def check_package(config: SegmentationRun) -> None:
    """Raise ValueError for what the released package cannot do, where it is the norm."""
    norm, precision = config.norm, config.trainer.precision
    if not isinstance(norm, PackageNorm):
        return
    if precision != "float32":
        raise ValueError(
            f"trainer.precision={precision} with norm=package: the released package computes in float32 only; give "
            f"trainer.precision=float32 (precision=float32 to eval.py), or norm=inplace"
        )
    if norm.activation not in PACKAGE_ACTIVATIONS:
        raise ValueError(
            f"norm.activation={norm.activation} with norm=package: the released package has "
            f"{', '.join(PACKAGE_ACTIVATIONS)}; choose one of them, or norm=inplace"
        )


def _alternative(group: str, name: object) -> type:
    alternatives = ALTERNATIVES[group]
    if name not in list(alternatives):
        raise ValueError(f"{group}.name={name}: expected one of {', '.join(alternatives)}")
    return alternatives[name]


def _check_data(data: Data) -> None:
    for name, values in (("mean", data.mean), ("std", data.std)):
        _check_length(f"data.{name}", values, 3, "3 numbers, red, green and blue")
    _check_length("data.scale", data.scale, 2, "2 numbers, the lowest and the highest factor")
    if data.scale[0] > data.scale[1]:
        raise ValueError(f"data.scale={data.scale}: expected the lowest factor first")


def _check_length(key: str, values: list | None, count: int, expected: str) -> None:
    if values is not None and len(values) != count:
        raise ValueError(f"{key}={values}: expected {expected}")


def _check_bounds(config, prefix: str = "") -> None:
    for entry in fields(config):
        value = getattr(config, entry.name)
        if is_dataclass(value):
            _check_bounds(value, f"{prefix}{entry.name}.")
            continue
        above, least, most, one_of = (entry.metadata.get(bound) for bound in ("above", "least", "most", "one_of"))
        if value is None:
            continue
        if one_of is not None and value not in one_of:
            raise ValueError(f"{prefix}{entry.name}={value}: expected one of {', '.join(map(str, one_of))}")
        if above is None and least is None:
            continue
        numbers = _numbers(value)
        # Written so that NaN fails; an empty list does not express anything either.
        low_enough = bool(numbers) and all(number <= (math.inf if most is None else most) for number in numbers)
        if above is not None and not (low_enough and all(above < number < math.inf for number in numbers)):
            raise ValueError(f"{prefix}{entry.name}={value}: expected a number above {above}{_at_most(most)}")
        if least is not None and not (low_enough and all(least <= number < math.inf for number in numbers)):
            raise ValueError(f"{prefix}{entry.name}={value}: expected {least} or more{_at_most(most)}")


def _at_most(most: float | None) -> str:
    return "" if most is None else f", at most {most}"


def _numbers(value) -> list[float]:
    if isinstance(value, list):
        return [number for entry in value for number in _numbers(entry)]
    return [value]
