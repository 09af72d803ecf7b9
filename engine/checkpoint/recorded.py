"""The configuration that a checkpoint or results have recorded -> a checked dataclass of `engine.schema`."""

from collections.abc import Container, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import field, fields, make_dataclass
from functools import partial
from typing import Any, cast

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from engine.configuration.config import RUNS, Schema
from engine.process.console import logger
from engine.process.plugins import LOADED
from engine.schema.keys import alternative, bases_of, declared_in, groups_of, without_interpolation
from engine.schema.training import TrainingRun
from models.private_torch import tree_map


class PluginsNeeded(ValueError):
    """A checkpoint names a choice that is unknown, and plugins that may have registered it are not loaded."""

    def __init__(self, choice: str, names: Sequence[str]):
        super().__init__(f"{choice}: registered by plugins=[{','.join(names)}], which is not given")
        self.in_python = f"{choice} is registered by a module of your own: import {', '.join(names)} first"


def of_checkpoint(state: dict, source: str, builds: Container[str] | None = None) -> TrainingRun:
    """The configuration in the content of a checkpoint, of any task. `builds` and errors: see `from_plain`."""
    return from_plain(state["config"], RUNS[state["task"]], source, builds)


def from_plain(
    values: dict, schema: type[Schema], source: str = "the checkpoint", builds: Container[str] | None = None
) -> Schema:
    """The inverse of `plain`; absent keys get their defaults.

    `builds`: the groups of which choices are needed, by default all. Choices of others that plugins have registered
    which are not loaded keep their values; a warning lists them.

    ValueError: a key, or the type of a value, does not fit the schema (PluginsNeeded: nor a choice, which a plugin may
    have registered that is not loaded). Names `source`.
    """
    absent_plugins = [name for name in values.get("plugins", ()) if name not in LOADED]
    unknown_choices: list[str] = []
    try:
        merged = OmegaConf.structured(schema)
        for group, classes in groups_of(schema).items():
            is_list = "is_list" in declared_in(schema)[group].metadata
            group_values = values.get(group, {})
            values_by_name = group_values if is_list else {group_values.get("name"): group_values}
            unknown_names = [name for name in values_by_name if name not in classes] if absent_plugins else []
            if unknown_names and (builds is None or group in builds):
                raise PluginsNeeded(f"{source}: {group}={unknown_names[0]}", absent_plugins)
            unknown_choices += [f"{group}={name}" for name in unknown_names]
            base = bases_of(schema)[group]
            alternatives = classes | {name: _absent(base, classes, values_by_name[name]) for name in unknown_names}
            choices = {name: OmegaConf.structured(alternative(group, alternatives, name)) for name in values_by_name}
            merged[group] = choices if is_list else choices[group_values.get("name")]
        # Without interpolations: a checkpoint must not read this machine's environment variables.
        literal = tree_map(lambda leaf: without_interpolation(leaf) if isinstance(leaf, str) else leaf, values)
        config = OmegaConf.to_object(OmegaConf.merge(merged, literal))
    except PluginsNeeded:
        raise
    except (OmegaConfBaseException, TypeError, ValueError) as error:
        raise ValueError(f"{source}: its configuration does not fit this version of the code: {error}") from error
    if unknown_choices:
        needed = PluginsNeeded(", ".join(unknown_choices), absent_plugins)
        logger.warning(f"{source}: {needed}; this command does without")
    return cast(Schema, config)


def _absent(base: type, classes: Mapping[str, type], values: Mapping[str, Any]) -> type:
    """A class for a choice that nobody has registered here, with all of its values; `is_absent` marks it.

    It derives from what ours of the group derive from: `base`, or the class between it and them with most of its keys.
    """
    candidates = [base, *_subclasses(base, {*classes.values()})]
    keys = {kind: {key.name for key in fields(kind)} for kind in candidates}
    parent = max(candidates, key=lambda kind: len(keys[kind]) if keys[kind] <= values.keys() else 0)
    added_fields: list[Any] = [
        (name, Any, field(default_factory=partial(copy, value)))
        for name, value in values.items()
        if name not in keys[parent]
    ]
    return make_dataclass(parent.__name__, added_fields, bases=(parent,), namespace={"is_absent": True, "builds": ""})


def _subclasses(kind: type[Any], choices: Container[type]) -> Iterator[type[Any]]:
    """The classes below a kind that are neither choices nor absent ones, nor derive from such."""
    for subclass in kind.__subclasses__():
        if subclass not in choices and not getattr(subclass, "is_absent", False):
            yield subclass
            yield from _subclasses(subclass, choices)
