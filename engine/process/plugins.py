"""The plugins that this process has loaded: the user's own modules, which register choices."""

import hashlib
from pathlib import Path
from typing import NamedTuple

LOADED: dict[str, "Plugin"] = {}  # by name; only `engine.configuration.importing.load` fills it


class Plugin(NamedTuple):
    """A module or package that `plugins=[…]` has named."""

    files: tuple[Path, ...]  # its Python files, first the module's own
    configs: Path | None  # its folder of YAML files, which is searched after ours

    def hashes(self) -> dict[str, str]:
        """SHA-256 of each file, by its path from the plugin's own folder."""
        top = self.files[0].parent
        return {file.relative_to(top).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest() for file in self.files}


def name_of(given: str) -> str:
    """The name of a plugin that is given as a module's name, or as the path of a file or of a package's folder."""
    return Path(given).stem if given.endswith(".py") or "/" in given else given


def words() -> list[str]:
    """The word that loads the same plugins in a process with another current folder; none without plugins."""
    files = {name: plugin.files[0] for name, plugin in LOADED.items()}
    paths = {name: file.parent if file.name == "__init__.py" else file for name, file in files.items()}
    places = [name if "." in name else str(path) for name, path in paths.items()]
    return [f"plugins=[{','.join(places)}]"] if places else []


def hashes() -> dict[str, dict[str, str]]:
    """{plugin: {file: SHA-256}} of all that are loaded, for records."""
    return {name: plugin.hashes() for name, plugin in LOADED.items()}


def changed_since(recorded: dict[str, dict[str, str]]) -> list[str]:
    """The files of loaded plugins that are not as `hashes` has recorded them."""
    now = hashes()
    pairs = ((name, {**files, **now[name]}) for name, files in recorded.items() if name in now)
    return [file for name, files in pairs for file in files if now[name].get(file) != recorded[name].get(file)]
