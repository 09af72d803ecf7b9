"""Convert Hydra's configs to checked dataclasses of `engine.schema`, and dataclasses to plain dictionaries and back."""

import os
from dataclasses import fields
from typing import Any, TypeVar, cast

from omegaconf import DictConfig, OmegaConf

from engine.process.plugins import LOADED, name_of
from engine.schema.classification import ClassificationRun
from engine.schema.keys import Keys, complete_and_check, leaves
from engine.schema.segmentation import SegmentationRun
from engine.schema.training import TrainingRun
from models.private_torch import tree_map

RUNS: dict[str, type[TrainingRun]] = {run.task: run for run in (SegmentationRun, ClassificationRun)}
Schema = TypeVar("Schema", bound=Keys)


def typed(values: DictConfig, schema: type[Schema]) -> Schema:
    """Turn a config that Hydra composed from `schema` into a checked dataclass instance. Paths may begin with ~.

    ValueError: a key is missing or unknown, or a value breaks its bounds or a rule; names the key.
    """
    missing = sorted(OmegaConf.missing_keys(values))
    if missing:
        raise ValueError(f"{missing[0]} has no value: give {missing[0]}=… on the command line")
    config = cast(Schema, OmegaConf.to_object(values))
    plugins = getattr(config, "plugins", [])
    if plugins and {*map(name_of, plugins)} != LOADED.keys():
        raise ValueError(f"plugins={plugins}: only the command line names plugins; leave it out elsewhere")
    # In a training, ~ is kept in keys that ranks and resumed runs compare: home folders differ between machines.
    _expand_home(config, all_keys=not isinstance(config, TrainingRun))
    complete_and_check(config)
    return config


def _expand_home(config: Keys, *, all_keys: bool) -> None:
    """Expand ~ at the beginning of texts, in place; without `all_keys` only where a resumed run may differ."""
    for field in fields(config):
        value = getattr(config, field.name)
        if isinstance(value, Keys):
            _expand_home(value, all_keys=all_keys)
        elif all_keys or field.metadata.get("free_on_resume"):
            expanded = tree_map(lambda leaf: os.path.expanduser(leaf) if isinstance(leaf, str) else leaf, value)
            setattr(config, field.name, expanded)


def plain(config: Keys) -> dict:
    """A schema's instance as nested dictionaries, lists, strings and numbers."""
    values = cast(dict, OmegaConf.to_container(OmegaConf.structured(config)))
    return values | {"plugins": [*map(name_of, values["plugins"])]} if "plugins" in values else values


def yaml(config: Keys) -> str:
    """A schema's instance as YAML."""
    return OmegaConf.to_yaml(OmegaConf.create(plain(config)))


def flat(values: Any, prefix: str = "") -> dict:
    """{"optim": {"lr": 1}} -> {"optim.lr": 1}"""
    flattened: dict = {}
    for key, value in values.items():
        flattened |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flattened


def values_but(config: Keys, mark: str) -> dict[str, object]:
    """{"optim.lr": 1, …}: all keys, except those with a mark such as `free_on_resume` or `per_machine`, see `key`.

    Of plugins the names: their paths differ between machines.
    """
    values = {name: value for name, value, field in leaves(config) if not field.metadata.get(mark)}
    return values | {"plugins": sorted(map(name_of, getattr(config, "plugins", ())))}
