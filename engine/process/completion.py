"""Shell completion from what an earlier one has kept: importing a command takes longer than its user waits."""

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


def kept(command: str) -> Path:
    """The file with a command's keys and choices, in the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return cache / "inplace-abn-segmentation" / "completion" / f"{command}.json"


def keep(command: str) -> None:
    """Keep what Hydra knows of a command, without types, where a cache can be written."""
    file = kept(command)
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps([*_stored(ConfigStore.instance().repo)]), "utf-8")
        partial.rename(file)


def _stored(repo: Mapping, group: str = "") -> Iterator[tuple[str, object, str, str]]:
    for name, node in repo.items():
        if isinstance(node, dict):
            yield from _stored(node, f"{group}/{name}".lstrip("/"))
        elif not group.startswith("hydra"):  # Hydra and its plugins store their own
            yield name.removesuffix(".yaml"), OmegaConf.to_container(node.node), group, node.package


def complete() -> None:
    """End with Hydra's answer, unless nothing is kept that is newer than every key's declaration."""
    command = Path(sys.argv[0]).stem
    declared = (ROOT / "engine" / "schema").glob("*.py")
    if not kept(command).is_file() or kept(command).stat().st_mtime < max(file.stat().st_mtime for file in declared):
        return
    for name, node, group, package in json.loads(kept(command).read_text("utf-8")):
        ConfigStore.instance().store(name, node, group or None, package)
    hydra.version.setbase("1.3")
    program = Hydra.create_main_hydra2(command, create_config_search_path(str(ROOT / "configs")))
    program.shell_completion(command, [word for word in sys.argv[1:] if "=" in word])
    sys.exit()
