"""Shell completion from a cache that an earlier one has written: importing a command takes longer than users wait."""

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import hydra
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

ROOT = Path(__file__).resolve().parents[2]


def cache_file(command: str) -> Path:
    """The file with a command's keys and choices, in the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return cache / "inplace-abn-segmentation" / "completion" / f"{command}.json"


def write_cache(command: str) -> None:
    """Write the configurations that Hydra has stored for a command, as plain values; nothing if no disk takes them."""
    file = cache_file(command)
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps([*_stored(ConfigStore.instance().repo)]), "utf-8")
        partial.rename(file)


def _stored(repo: Mapping, group: str = "") -> Iterator[tuple[str, object, str, str]]:
    """(name, values, group, package) of each configuration in Hydra's store."""
    for name, node in repo.items():
        if isinstance(node, dict):
            yield from _stored(node, f"{group}/{name}".lstrip("/"))
        elif not group.startswith("hydra"):  # Hydra and its plugins store their own
            yield name.removesuffix(".yaml"), OmegaConf.to_container(node.node), group, node.package


def complete() -> None:
    """Print Hydra's completions and end the process, unless the cache is older than a key's declaration, or absent."""
    command = Path(sys.argv[0]).stem
    file = cache_file(command)
    declarations = (ROOT / "engine" / "schema").glob("*.py")
    if not file.is_file() or file.stat().st_mtime < max(path.stat().st_mtime for path in declarations):
        return
    for name, values, group, package in json.loads(file.read_text("utf-8")):
        ConfigStore.instance().store(name, values, group or None, package)
    hydra.version.setbase("1.3")
    program = Hydra.create_main_hydra2(command, create_config_search_path(str(ROOT / "configs")))
    program.shell_completion(command, [word for word in sys.argv[1:] if "=" in word])
    sys.exit()
