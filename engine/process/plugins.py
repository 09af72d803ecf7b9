"""plugins=[…] on the command line: modules of the user's own, which register choices when they are imported."""

import hashlib
import importlib
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

KEY = "plugins"
LOADED: dict[str, "Plugin"] = {}  # by name; only `load` fills it
_REPOSITORY = Path(__file__).resolve().parents[2]


class Plugin(NamedTuple):
    """A module or package that `plugins=[…]` has named."""

    files: tuple[Path, ...]  # its Python files, first the module's own
    configs: Path | None  # its folder of YAML files, which is searched after ours

    def hashes(self) -> dict[str, str]:
        """SHA-256 of each file, by its path from the plugin's own folder."""
        top = self.files[0].parent
        return {file.relative_to(top).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest() for file in self.files}


def load(words: Sequence[str], choices: Mapping[str, Mapping[str, type]]) -> None:
    """Import the plugins that a command names, once.

    `choices`: {group: {name: class}} of all that are registered.
    ValueError: one cannot be found or imported, another file has its name, or it registers nothing.
    """
    for word in words:
        key, equals, value = word.partition("=")
        if key == KEY and equals:
            for given in filter(None, value.strip("[]").split(",")):
                _load(given.strip().strip("'\""), choices)


def _load(given: str, choices: Mapping[str, Mapping[str, type]]) -> None:
    name, file = name_of(given), _file_of(given)
    if name in LOADED:
        return
    if file is not None:  # at the end, so that it hides no module of ours
        folder = str(file.parents[name.count(".") + (file.name == "__init__.py")])
        sys.path.extend([folder] if folder not in sys.path else [])
    known, threads = _modules(choices), threading.active_count()
    try:
        module = importlib.import_module(name)
    except (Exception, SystemExit) as error:  # a module may raise anything
        if isinstance(error, ModuleNotFoundError) and error.name == name:
            raise ValueError(
                f"{KEY}=[{given}]: there is no {name}.py or package {name} in {Path.cwd()}, nor where Python looks; "
                f"give its path"
            ) from error
        about = f"{type(error).__name__}: {error}{hidden_library(error)}"
        raise ValueError(f"{KEY}=[{given}] cannot be imported: {about}") from error
    found = Path(module.__file__ or "").resolve()
    if file not in (None, found):
        raise ValueError(f"{KEY}=[{given}]: {file} is hidden by {found}, of the same name: rename it")
    is_package = found.name == "__init__.py"
    places = [found.parent / "configs", *([found.parent.parent / "configs"] if is_package else [])]
    configs = next((place for place in places if place.is_dir() and place.resolve().parent != _REPOSITORY), None)
    if configs is None and not any(own not in known or f"{own}.".startswith(f"{name}.") for own in _modules(choices)):
        raise ValueError(f"{KEY}=[{given}]: {found} registers no choice, and has no folder configs beside it")
    if threading.active_count() > threads or torch.cuda.is_initialized():
        raise ValueError(
            f"{KEY}=[{given}]: importing {found} starts a thread or uses a GPU, but help, sweeps and data workers "
            f"import it, too: do that in a logger, or when the network is built"
        )
    others = sorted({*found.parent.rglob("*.py")} - {found}) if is_package else []
    LOADED[name] = Plugin((found, *others), configs)


def _file_of(given: str) -> Path | None:
    """The file that a plugin is expected in; None where only Python's own search can tell."""
    is_path = given.endswith(".py") or "/" in given
    place = Path(given).expanduser().resolve() if is_path else Path.cwd().resolve() / given.replace(".", "/")
    options = [place] if given.endswith(".py") else [place / "__init__.py", place.with_name(f"{place.name}.py")]
    file = next((option for option in options if option.is_file()), None)
    if is_path and file is None:
        raise ValueError(f"{KEY}=[{given}]: there is no such file, nor a package; expected a .py or a package's folder")
    return file


def _modules(choices: Mapping[str, Mapping[str, type]]) -> set[str]:
    """The modules that have registered choices."""
    return {own.__module__ for known in choices.values() for own in known.values()}


def hidden_library(error: BaseException) -> str:
    """The end of a message: that a package of ours hides another, if the error came from what ours lacks; or empty."""
    missing = error.name if isinstance(error, ImportError) else getattr(getattr(error, "obj", None), "__name__", None)
    top = str(missing).partition(".")[0]
    file = getattr(sys.modules.get(top), "__file__", None)
    if file is None or Path(file).resolve().parents[1] != _REPOSITORY:
        return ""
    return (
        f". In these commands {top} is {Path(file).parent}, which hides any other {top}: rename your own module; what "
        f"needs a library of this name, such as Hugging Face's datasets, runs in a program before, and writes files"
    )


def name_of(given: str) -> str:
    """The name of a plugin that is given as a module's name, or as the path of a file or of a package's folder."""
    return Path(given).stem if given.endswith(".py") or "/" in given else given


def words() -> list[str]:
    """The word that loads the same plugins in a process with another current folder; none without plugins."""
    files = {name: plugin.files[0] for name, plugin in LOADED.items()}
    paths = {name: file.parent if file.name == "__init__.py" else file for name, file in files.items()}
    places = [name if "." in name else str(path) for name, path in paths.items()]
    return [f"{KEY}=[{','.join(places)}]"] if places else []


def hashes() -> dict[str, dict[str, str]]:
    """{plugin: {file: SHA-256}} of all that are loaded, for records."""
    return {name: plugin.hashes() for name, plugin in LOADED.items()}


def changed_since(recorded: dict[str, dict[str, str]]) -> list[str]:
    """The files of loaded plugins that are not as `hashes` has recorded them."""
    now = hashes()
    pairs = ((name, {**files, **now[name]}) for name, files in recorded.items() if name in now)
    return [file for name, files in pairs for file in files if now[name].get(file) != recorded[name].get(file)]
