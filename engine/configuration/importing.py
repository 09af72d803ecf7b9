"""plugins=[…] on the command line: modules of the user's own, which register choices when they are imported."""

import importlib
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import torch
from hydra.core.config_store import ConfigStore

from engine.configuration.choices import CONFIGS
from engine.process.plugins import LOADED, Plugin, name_of
from engine.schema.keys import CHOICES

KEY = "plugins"


def load(words: Sequence[str]) -> None:
    """Import the plugins that a command names, once.

    ValueError: one cannot be found or imported, another file has its name, or it registers nothing.
    """
    for word in words:
        key, equals, value = word.partition("=")
        if key == KEY and equals:
            for given in filter(None, value.strip("[]").split(",")):
                _load(given.strip().strip("'\""))


def _load(given: str) -> None:
    name, file = name_of(given), _file_of(given)
    if name in LOADED:
        return
    if file is not None:  # at the end, so that it hides no module of ours
        folder = str(file.parents[name.count(".") + (file.name == "__init__.py")])
        sys.path.extend([folder] if folder not in sys.path else [])
    known, threads = _modules(), threading.active_count()
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise _failed(given, error) from error
        raise ValueError(
            f"{KEY}=[{given}]: there is no {name}.py or package {name} in {Path.cwd()}, nor where Python looks; give "
            f"its path"
        ) from error
    except (Exception, SystemExit) as error:  # a module may raise anything
        raise _failed(given, error) from error
    found = Path(module.__file__ or "").resolve()
    if file not in (None, found):
        raise ValueError(f"{KEY}=[{given}]: {file} is hidden by {found}, of the same name: rename it")
    is_package = found.name == "__init__.py"
    places = [found.parent / "configs", *([found.parent.parent / "configs"] if is_package else [])]
    configs = next((place for place in places if place.is_dir() and place.resolve() != CONFIGS), None)
    if configs is None and not any(own not in known or f"{own}.".startswith(f"{name}.") for own in _modules()):
        raise ValueError(f"{KEY}=[{given}]: {found} registers no choice, and has no folder configs beside it")
    if threading.active_count() > threads or torch.cuda.is_initialized():
        raise ValueError(
            f"{KEY}=[{given}]: importing {found} starts a thread or uses a GPU, but help, sweeps and data workers "
            f"import it, too: do that in a logger, or when the network is built"
        )
    if configs is not None:
        _prefer_files(configs)
    others = sorted({*found.parent.rglob("*.py")} - {found}) if is_package else []
    LOADED[name] = Plugin((found, *others), configs)


def _prefer_files(configs: Path) -> None:
    """Where a file has a choice's name, it is the choice: it builds on the class."""
    for group, known in CHOICES.items():
        for file in (configs / group).glob("*.yaml"):
            if file.stem in known:
                ConfigStore.instance().repo[group].pop(file.name, None)


def _file_of(given: str) -> Path | None:
    """The file that a plugin is expected in; None where only Python's own search can tell."""
    is_path = given.endswith(".py") or "/" in given
    place = Path(given).expanduser().resolve() if is_path else Path.cwd().resolve() / given.replace(".", "/")
    options = [place] if given.endswith(".py") else [place / "__init__.py", place.with_name(f"{place.name}.py")]
    file = next((option for option in options if option.is_file()), None)
    if is_path and file is None:
        raise ValueError(f"{KEY}=[{given}]: there is no such file, nor a package; expected a .py or a package's folder")
    return file


def _modules() -> set[str]:
    """The modules that have registered choices."""
    return {own.__module__ for known in CHOICES.values() for own in known.values()}


def _failed(given: str, error: BaseException) -> ValueError:
    return ValueError(f"{KEY}=[{given}] cannot be imported: {type(error).__name__}: {error}")
