"""Choices that only a test registers."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import make_dataclass
from typing import Any

from hydra.core.config_store import ConfigStore

from engine.schema.keys import CHOICES, choice, declared_in


@contextmanager
def forgotten() -> Iterator[None]:
    """Context after which choices that were registered in it are unknown again."""
    before, repo = {group: {*choices} for group, choices in CHOICES.items()}, ConfigStore.instance().repo
    yield
    for group, choices in CHOICES.items():
        for name in {*choices} - before.get(group, set()):
            del choices[name]
            for place in (repo, repo["schema"]):
                place.get(group, {}).pop(f"{name}.yaml", None)
    declared_in.cache_clear()


@contextmanager
def registered(choices: Iterable[tuple[str, type, str, Any]]) -> Iterator[None]:
    """Context in which choices are known: (group, its class, name, what it builds). An optimiser has a rate of 0.05."""
    with forgotten():
        for group, base, name, builds in choices:
            keys: list[Any] = [("name", str, name), *[("lr", float, 0.05)] * (group == "optim")]
            namespace = {"builds": builds, "__module__": __name__}
            schema = make_dataclass(f"Own{name.title()}", keys, bases=(base,), namespace=namespace)
            globals()[schema.__name__] = choice(group)(schema)  # where copies of a configuration look for it
        yield
