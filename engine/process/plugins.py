"""plugins=[…] on the command line: modules of the user's own, which register choices when they are imported."""

import grp
import importlib
import os
import pwd
import stat
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch

KEY = "plugins"
TRUST = "trust_plugins=true"
LOADED: dict[str, "Plugin"] = {}  # by name; only `load` fills it
ADDED: list[Path] = []  # the folder of Hydra's option --config-dir
_REPOSITORY = Path(__file__).resolve().parents[2]


class Plugin(NamedTuple):
    """A module or package that `plugins=[…]` has named."""

    files: tuple[Path, ...]  # its Python files, first the module's own
    configs: Path | None  # its folder of YAML files, which is searched after ours


def folders() -> list[Path]:
    """Folders of YAML files that are searched after ours: of --config-dir, then of each plugin."""
    return [*ADDED, *(plugin.configs for plugin in LOADED.values() if plugin.configs is not None)]


def load(words: Sequence[str], choices: Mapping[str, Mapping[str, type]]) -> None:
    """Import the plugins that a command names, once.

    `choices`: {group: {name: class}} of all that are registered.
    ValueError: one cannot be found or imported, another file has its name, it registers nothing, or other users could
    change it and no word trusts them.
    """
    is_trusted = TRUST in map(str.lower, words)
    for word in words:
        key, equals, value = word.partition("=")
        if key == KEY and equals:
            for text in filter(None, value.strip("[]").split(",")):
                place = text.strip().strip("'\"")
                try:
                    _load(place, choices, is_trusted)
                except ValueError as error:
                    raise ValueError(f"{KEY}=[{place}]: {error}") from error


def _load(place: str, choices: Mapping[str, Mapping[str, type]], is_trusted: bool) -> None:
    """Import the plugin at a place, and check what it does."""
    name = name_of(place)
    if not name.strip("."):
        raise ValueError("expected a module's name, or the path of a .py file or of a package's folder")
    file = _file_of(place)
    if name in LOADED:
        return
    shared_path = None if file is None or is_trusted else _shared_path(file, _configs_of(file))
    if shared_path is not None:
        raise ValueError(
            f"another user owns {shared_path}, or can write to it, and could run code as you: make it your own "
            f"(chown; chmod go-w), or give {TRUST}"
        )
    modules_before = _modules(choices)
    threads_before = threading.active_count()
    plugin = _plugin_of(_imported(file, name), name)
    if file not in (None, plugin.files[0]):
        raise ValueError(f"{file} is hidden by {plugin.files[0]}, of the same name: rename it")
    new_modules = _modules(choices) - modules_before
    registers = new_modules or any(f"{module}.".startswith(f"{name}.") for module in modules_before)
    if plugin.configs is None and not registers:
        raise ValueError(
            f"{plugin.files[0]} registers no choice by @choice(GROUP), and has no folder configs beside it"
        )
    if threading.active_count() > threads_before or torch.cuda.is_initialized():
        raise ValueError(
            f"importing {plugin.files[0]} starts a thread or uses a GPU, but help, sweeps and data workers import it, "
            f"too: do that in a logger, or when the network is built"
        )
    LOADED[name] = plugin


def _imported(file: Path | None, name: str) -> ModuleType:
    """Import a plugin, see `_import_from`. ValueError: there is none, or its code fails."""
    try:
        return _import_from(file, name)
    except (Exception, SystemExit) as error:  # a module may raise anything
        parent, _, last = name.rpartition(".")
        if isinstance(error, ModuleNotFoundError) and error.name in (name, parent):
            if parent and _file_of(parent) is not None:
                raise ValueError(f"{last} is no module in {parent}: give {KEY}=[{parent}], which is one") from error
            raise ValueError(
                f"there is no {name}.py or package {name} in {Path.cwd()}, nor where Python looks; give its path"
            ) from error
        message = f"{type(error).__name__}: {error}{hidden_library(error)}"
        raise ValueError(f"it cannot be imported: {message}") from error


def _plugin_of(module: ModuleType, name: str) -> Plugin:
    """The files of an imported plugin. ValueError: it is no module of the user's own."""
    if getattr(module, "__file__", None) is None:
        raise ValueError(f"{name} is no file of Python code: expected a module of your own")
    file = Path(module.__file__ or "").resolve()
    package_files = {*file.parent.rglob("*.py")} if _is_package(file) else set()
    return Plugin((file, *sorted(package_files - {file})), _configs_of(file))


def _import_from(file: Path | None, name: str) -> ModuleType:
    """Import a plugin, from `file` if that is known.

    Its folder goes to the end of `sys.path`, so that it hides no module of ours. A folder that others can write to does
    not: the plugin's file alone is run, and no __pycache__ of theirs.
    """
    if file is None:
        return importlib.import_module(name)
    folder = file.parents[name.count(".") + _is_package(file)]
    if not is_shared(folder):
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
    elif "." not in name and find_spec(name) is None:
        sys.modules[name] = module = ModuleType(name)
        module.__file__ = str(file)
        module.__package__ = name
        module.__path__ = [str(file.parent)] if _is_package(file) else []
        try:
            exec(compile(file.read_bytes(), file, "exec"), vars(module))
        except BaseException:
            del sys.modules[name]
            raise
    return importlib.import_module(name)


def is_shared(path: Path, may_add: bool = False) -> bool:
    """Whether a user other than this one and root owns a file or folder, or can write to it.

    `may_add`: others may write to a folder like /tmp, where they can add files but not replace this user's.
    """
    status = path.stat()
    mode = status.st_mode
    if status.st_uid not in (0, os.getuid()):
        return True
    if may_add and mode & stat.S_ISVTX:
        return False
    return bool(mode & stat.S_IWOTH or mode & stat.S_IWGRP and not _is_private(status.st_gid))


def _is_private(group_id: int) -> bool:
    """Whether a group is the one that most systems make for this user alone."""
    with suppress(KeyError):
        user_name = pwd.getpwuid(os.getuid()).pw_name
        record = grp.getgrgid(group_id)
        return record.gr_name == user_name and {*record.gr_mem} <= {user_name}
    return False


def _shared_path(file: Path, configs: Path | None) -> Path | None:
    """A path of a plugin that other users could change: its file or package, their folder, or a YAML file."""
    top = file.parent if _is_package(file) else file
    if is_shared(top.parent, may_add=True):
        return top.parent
    paths = [top, *top.rglob("*"), *([configs, *configs.rglob("*")] if configs else [])]
    return next((path for path in paths if path.exists() and is_shared(path)), None)


def _is_package(file: Path) -> bool:
    return file.name == "__init__.py"


def _configs_of(file: Path) -> Path | None:
    """The folder of a plugin's YAML files, if it has one; never ours."""
    parents = [file.parent, file.parent.parent] if _is_package(file) else [file.parent]
    candidates = (parent / "configs" for parent in parents)
    return next((folder for folder in candidates if folder.is_dir() and folder.resolve().parent != _REPOSITORY), None)


def _file_of(place: str) -> Path | None:
    """The file that a plugin is expected in; None where only Python's own search can tell."""
    is_path = place.endswith(".py") or "/" in place
    path = Path(place).expanduser().resolve() if is_path else Path.cwd().resolve() / place.replace(".", "/")
    candidates = [path] if place.endswith(".py") else [path / "__init__.py", path.parent / f"{path.name}.py"]
    file = next((candidate for candidate in candidates if candidate.is_file()), None)
    if is_path and file is None:
        raise ValueError("there is no such file, nor a package; expected a .py or a package's folder")
    return file


def _modules(choices: Mapping[str, Mapping[str, type]]) -> set[str]:
    """The modules that have registered choices."""
    return {kind.__module__ for classes in choices.values() for kind in classes.values()}


@contextmanager
def errors_named(source: str) -> Iterator[None]:
    """Context that turns any error of code that is not ours into a ValueError, which begins with its source."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise ValueError(f"{source}: {type(error).__name__}: {error}") from error


def hidden_library(error: BaseException) -> str:
    """The end of a message: that a package of ours hides another, if the error came from what ours lacks; or empty."""
    missing = error.name if isinstance(error, ImportError) else getattr(getattr(error, "obj", None), "__name__", None)
    library = str(missing).partition(".")[0]
    file = getattr(sys.modules.get(library), "__file__", None)
    if file is None or Path(file).resolve().parents[1] != _REPOSITORY:
        return ""
    return (
        f". In these commands {library} is {Path(file).parent}, which hides any other {library}: rename your own "
        f"module; what needs a library of this name, such as Hugging Face's datasets, runs in a program before, and "
        f"writes files"
    )


def name_of(place: str) -> str:
    """The name of a plugin from its place: a module's name, or the path of a file or of a package's folder."""
    return Path(place).stem if place.endswith(".py") or "/" in place else place


def words() -> list[str]:
    """The words that load the same plugins in a process with another current folder; none without plugins."""
    files = {name: plugin.files[0] for name, plugin in LOADED.items()}
    places = [name if "." in name else str(file.parent if _is_package(file) else file) for name, file in files.items()]
    trust = [TRUST] if any(_shared_path(plugin.files[0], plugin.configs) for plugin in LOADED.values()) else []
    return [f"{KEY}=[{','.join(places)}]", *trust] if places else []


def hashes() -> dict[str, dict[str, str]]:
    """{plugin: {file: SHA-256}} of all that are loaded, for records. Files are named from the plugin's own folder."""
    return {
        name: {str(file.relative_to(files[0].parent)): sha256(file.read_bytes()).hexdigest() for file in files}
        for name, (files, _) in LOADED.items()
    }


def changed_since(recorded: dict[str, dict[str, str]]) -> list[str]:
    """The files of loaded plugins that are not as `hashes` has recorded them."""
    present = hashes()
    pairs = [(files, present[name]) for name, files in recorded.items() if name in present]
    return [file for before, after in pairs for file in before | after if before.get(file) != after.get(file)]
