"""Convert Hydra's configs to checked dataclasses of `engine.schema`, and dataclasses to plain dictionaries and back."""

import os
from collections.abc import Container, Mapping, Sequence
from copy import copy
from dataclasses import field, fields, make_dataclass
from functools import partial
from typing import Any, TypeVar, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from engine.process.console import logger
from engine.process.plugins import LOADED, name_of
from engine.schema.classification import ClassificationRun
from engine.schema.keys import (
    Keys,
    alternative,
    bases_of,
    check_values,
    declared_in,
    groups_of,
    is_absent,
    leaves,
    without_interpolation,
)
from engine.schema.segmentation import SegmentationRun
from engine.schema.training import TrainingRun
from keepless.torch_internals import tree_map

RUNS: dict[str, type[TrainingRun]] = {run.task: run for run in (SegmentationRun, ClassificationRun)}
Schema = TypeVar("Schema", bound=Keys)


class PluginsNeeded(ValueError):
    """A checkpoint names a choice that is unknown, and plugins that may have registered it are not loaded."""

    def __init__(self, choice: str, names: Sequence[str]):
        super().__init__(f"{choice}: registered by plugins=[{','.join(names)}], which is not given")
        self.in_python = f"{choice} is registered by a module of your own: import {', '.join(names)} first"


def typed(values: DictConfig, schema: type[Schema]) -> Schema:
    """Turn a config that Hydra composed from `schema` into a checked dataclass instance. Paths may begin with ~.

    ValueError: a key is missing or unknown, or a value breaks its bounds or a rule; names the key.
    """
    if missing := sorted(OmegaConf.missing_keys(values)):
        raise ValueError(f"{missing[0]} has no value: give {missing[0]}=… on the command line")
    config = cast(Schema, OmegaConf.to_object(values))
    if given := getattr(config, "plugins", []):
        if {*map(name_of, given)} != LOADED.keys():
            raise ValueError(f"plugins={given}: only the command line names plugins; leave it out elsewhere")
    # In a training, ~ is kept in keys that ranks and resumed runs compare: home folders differ between machines.
    _expand_home(config, all_keys=not isinstance(config, TrainingRun))
    check_values(config)
    return config


def _expand_home(config: Keys, *, all_keys: bool) -> None:
    """Expand ~ at the beginning of texts, in place; without `all_keys` only where a resumed run may differ."""
    for entry in fields(config):
        value = getattr(config, entry.name)
        if isinstance(value, Keys):
            _expand_home(value, all_keys=all_keys)
        elif all_keys or entry.metadata.get("free_on_resume"):
            setattr(config, entry.name, tree_map(lambda v: os.path.expanduser(v) if isinstance(v, str) else v, value))


def of_checkpoint(state: dict, source: str, builds: Container[str] | None = None) -> TrainingRun:
    """The configuration in the content of a checkpoint, of any task. `builds`: see `from_plain`.

    ValueError, which names `source`: see `from_plain`; or a value breaks its bounds or a rule, as on the command line.
    """
    if state["task"] not in RUNS:
        raise ValueError(f"{source} is for the task {state['task']}: expected {' or '.join(RUNS)}")
    config = from_plain(state["config"], RUNS[state["task"]], source, builds)
    try:
        check_values(config)
    except ValueError as error:
        raise ValueError(f"{source}: its configuration has {error}") from error
    return config


def from_plain(
    values: dict, schema: type[Schema], source: str = "the checkpoint", builds: Container[str] | None = None
) -> Schema:
    """The inverse of `plain`; absent keys get their defaults.

    `builds`: the groups of which choices are needed, by default all. Choices of others that plugins have registered
    which are not loaded keep their values; a warning lists them.

    ValueError: a key, or the type of a value, does not fit the schema (PluginsNeeded: nor a choice, which a plugin may
    have registered that is not loaded). Names `source`.
    """
    names = values.get("plugins", ())
    absent, left = [str(name) for name in names if name not in LOADED] if isinstance(names, list) else [], list[str]()
    try:
        merged = OmegaConf.structured(schema)
        for group, known in groups_of(schema).items():
            given = values.get(group)
            given = given if isinstance(given, dict) else {}
            is_list = "is_list" in declared_in(schema)[group].metadata
            names = [*given] if is_list else [given.get("name")]
            kinds = dict(known)
            for name in (name for name in names if absent and name not in known):
                if builds is None or group in builds:
                    raise PluginsNeeded(f"{source}: {group}={name}", absent)
                kinds[name] = _absent(bases_of(schema)[group], known, given[name] if is_list else given)
                left.append(f"{group}={name}")
            made = {name: OmegaConf.structured(alternative(group, kinds, name)) for name in names}
            merged[group] = made if is_list else made[names[0]]
        # Without interpolations: a checkpoint must not read this machine's environment variables.
        literal = tree_map(lambda leaf: without_interpolation(leaf) if isinstance(leaf, str) else leaf, values)
        config = OmegaConf.to_object(OmegaConf.merge(merged, literal))
    except PluginsNeeded:
        raise
    except (OmegaConfBaseException, TypeError, ValueError) as error:
        raise ValueError(f"{source}: its configuration does not fit this version of the code: {error}") from error
    if left:
        logger.warning(f"{source}: {PluginsNeeded(', '.join(left), absent)}; this command does without")
    return cast(Schema, config)


def _absent(base: type, known: Mapping[str, type], values: Mapping[str, Any]) -> type:
    """A class for a choice that nobody has registered here, with all of its values; `is_absent` marks it.

    It derives from what ours of the group derive from: of `base` the class that has most of its keys.
    """
    kinds: list[type[Any]] = [base]
    for each in kinds:
        kinds += [sub for sub in each.__subclasses__() if sub not in known.values() and not is_absent(sub)]
    keys = {kind: {entry.name for entry in fields(kind)} for kind in kinds}
    kind = max(kinds, key=lambda kind: len(keys[kind]) if keys[kind] <= values.keys() else 0)
    others = {name: value for name, value in values.items() if name not in keys[kind]}
    own: list[Any] = [(name, Any, field(default_factory=partial(copy, value))) for name, value in others.items()]
    return make_dataclass(kind.__name__, own, bases=(kind,), namespace={"is_absent": True, "builds": ""})


def plain(config: Keys) -> dict:
    """A schema's instance as nested dictionaries, lists, strings and numbers."""
    values = cast(dict, OmegaConf.to_container(OmegaConf.structured(config)))
    return values | {"plugins": [*map(name_of, values["plugins"])]} if "plugins" in values else values


def yaml(config: Keys) -> str:
    """A schema's instance as YAML."""
    return OmegaConf.to_yaml(OmegaConf.create(plain(config)))


def flat(values: Any, prefix: str = "") -> dict:
    """{"optim": {"lr": 1}} -> {"optim.lr": 1}"""
    leaves: dict = {}
    for key, value in values.items():
        leaves.update(flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value})
    return leaves


def values_but(config: Keys, mark: str) -> dict[str, object]:
    """{"optim.lr": 1, …}: all keys, except those with a mark such as `free_on_resume` or `per_machine`, see `key`.

    Of plugins the names: their paths differ between machines.
    """
    found = {name: value for name, value, entry in leaves(config) if not entry.metadata.get(mark)}
    return found | {"plugins": sorted(map(name_of, getattr(config, "plugins", ())))}
