"""Provenance of numbers: hardware, versions and commit."""

import os
import platform
import re
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import torch

from engine.process import plugins

_REPOSITORY = Path(__file__).resolve().parents[2]
_PACKAGES = ("torch", "torchvision", "numpy", "opencv-python-headless", "hydra-core")


def provenance(packages: Iterable[str] = ()) -> dict:
    """{"hardware": str, "versions": {name: str}, "commit": str or None} of this process, also of `packages`.

    With plugins also {"plugins": {name: {file: SHA-256}}}.
    """
    versions = {"python": platform.python_version()}
    for package in (*_PACKAGES, *packages):
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    cpuinfo = Path("/proc/cpuinfo")
    match = re.search(r"model name\s*:(.*)", cpuinfo.read_text() if cpuinfo.is_file() else "")
    cpu = match[1].strip() if match else platform.processor() or platform.machine()
    cores = len(os.sched_getaffinity(0))
    hardware = f"{cpu}, {cores} core{'s' if cores > 1 else ''}"
    if torch.cuda.is_available():
        hardware = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}; {hardware}"
    record = {"hardware": hardware, "versions": versions, "commit": _commit()}
    return record | {"plugins": plugins.hashes()} if plugins.LOADED else record


def _commit() -> str | None:
    """The commit of the code, with "-dirty" if tracked files have changed; None outside a git checkout.

    Changes in docs and Markdown files do not count: records and pages are written between measurements.
    """
    try:
        commit = _git("rev-parse", "--short=12", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!docs", ":!*.md")
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{commit}-dirty" if changed else commit


def _git(*arguments: str) -> str:
    return subprocess.check_output(
        ["git", *arguments], cwd=_REPOSITORY, stderr=subprocess.DEVNULL, text=True, timeout=10
    ).strip()
