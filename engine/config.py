"""From what Hydra composes to checked dataclass instances of `engine.schema`, and to plain dictionaries and back."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import TypeVar

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from engine.schema.keys import alternative, check_values, groups_of
from engine.schema.training import TrainingRun

NEEDED_TO_EVALUATE = ("norm", "body", "head", "data", "trainer")  # groups
Schema = TypeVar("Schema", bound=TrainingRun)


def register(name: str, schema: type) -> None:
    """Make a schema known to Hydra as schema/NAME, and the alternatives of its groups as schema/GROUP/NAME."""
    store = ConfigStore.instance()
    store.store(group="schema", name=name, node=schema, package="_global_")
    for group, alternatives in groups_of(schema).items():
        for choice, node in alternatives.items():
            store.store(group=f"schema/{group}", name=choice, node=node, package=group)


def typed(values: DictConfig, schema=None):
    """The dataclass instance of a config that Hydra composed.

    Raises:
        ValueError: a key is missing or unknown, or a value breaks its bounds or a rule; names the key.
    """
    missing = sorted(OmegaConf.missing_keys(values))
    if missing:
        raise ValueError(f"{missing[0]} has no value: give {missing[0]}=… on the command line")
    config = OmegaConf.to_object(values)
    unknown = flat(OmegaConf.to_container(values)).keys() - flat(plain(config)).keys()
    if unknown:  # Hydra lets +key=… pass
        raise ValueError(f"{sorted(unknown)[0]} is not a key of the configuration; --cfg job prints those that are")
    check_values(config)
    return config


def of_checkpoint(state: dict, schema: type[Schema], source: str) -> Schema:
    """The configuration in a checkpoint of the schema's task.

    Raises:
        ValueError: the checkpoint is of another task, or has too many classes for it. Names `source`.
    """
    if state["task"] != schema.task:
        raise ValueError(f"{source} is of the task {state['task']}: expected {schema.task}")
    if len(state["classes"]) > schema.most_classes:
        raise ValueError(
            f"{source} has {len(state['classes'])} classes: expected at most {schema.most_classes} for {schema.task}"
        )
    return from_plain(state["config"], schema, source)


def from_plain(values: dict, schema: type[Schema], source: str = "the checkpoint") -> Schema:
    """The inverse of `plain`. Keys that are missing, because they are younger than a checkpoint, get their defaults.

    Only groups that an evaluation needs are checked; a training that continues compares all keys with the command's.

    Raises:
        ValueError: a key or value does not fit the schema. Names `source`.
    """
    with _misfits_of(source):
        merged = OmegaConf.structured(schema)
        for name, alternatives in groups_of(schema).items():
            merged[name] = _selected(values, name, alternatives)
        config = OmegaConf.to_object(OmegaConf.merge(merged, values))
        for entry in fields(config):
            if entry.name in NEEDED_TO_EVALUATE:
                check_values(getattr(config, entry.name), f"{entry.name}.")
        return config


def group_from_plain(values: dict, group: str, alternatives: dict[str, type], source: str):
    """One group of the configuration in a checkpoint of any task. ValueError: see `from_plain`."""
    with _misfits_of(source):
        config = OmegaConf.to_object(OmegaConf.merge(_selected(values, group, alternatives), values[group]))
        check_values(config, f"{group}.")
        return config


def _selected(values: dict, group: str, alternatives: dict[str, type]) -> DictConfig:
    chosen = values.get(group)
    name = chosen.get("name") if isinstance(chosen, dict) else None
    return OmegaConf.structured(alternative(group, alternatives, name))


@contextmanager
def _misfits_of(source: str) -> Iterator[None]:
    try:
        yield
    except (OmegaConfBaseException, TypeError, ValueError) as error:
        raise ValueError(f"{source}: its configuration does not fit this version of the code: {error}") from error


def plain(config) -> dict:
    """A schema's instance as nested dictionaries, lists, strings and numbers."""
    return OmegaConf.to_container(OmegaConf.structured(config))


def yaml(config) -> str:
    """A schema's instance as YAML."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def flat(values: dict, prefix: str = "") -> dict:
    """{"optim": {"lr": 1}} -> {"optim.lr": 1}"""
    leaves = {}
    for key, value in values.items():
        leaves.update(flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value})
    return leaves


def fixed(config, prefix: str = "") -> dict[str, object]:
    """{"optim.lr": 1, …}: the keys that say what a run computes, which a resumed run may not change."""
    leaves = {}
    for entry in fields(config):
        value = getattr(config, entry.name)
        if is_dataclass(value):
            leaves.update(fixed(value, f"{prefix}{entry.name}."))
        elif not entry.metadata.get("free_on_resume"):
            leaves[prefix + entry.name] = value
    return leaves
