"""Choices that only a test registers."""

from collections.abc import Iterator
from contextlib import contextmanager

from hydra.core.config_store import ConfigStore

from engine.schema.keys import CHOICES, declared_in


@contextmanager
def forgotten() -> Iterator[None]:
    """Context after which choices that were registered in it are unknown again."""
    before, repo = {group: {*known} for group, known in CHOICES.items()}, ConfigStore.instance().repo
    yield
    for group, known in CHOICES.items():
        for name in {*known} - before.get(group, set()):
            del known[name]
            for place in (repo, repo["schema"]):
                place.get(group, {}).pop(f"{name}.yaml", None)
    declared_in.cache_clear()
