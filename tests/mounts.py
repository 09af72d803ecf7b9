"""Mounts that only a process of its own sees: a network folder whose server is gone, and a small /dev/shm."""

import ctypes
import os
import subprocess
from pathlib import Path

import pytest

_CLONE_NEWNS, _MS_REC, _MS_PRIVATE = 0x20000, 0x4000, 0x40000

_may_mount = (
    os.path.exists("/dev/fuse") and not subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode
)
needs_mounts = pytest.mark.skipif(not _may_mount, reason="this system does not let us mount")


def mount_dead(folder: Path) -> None:
    """Make whoever looks into `folder` wait for ever, ignoring signals: a FUSE folder that nobody serves."""
    device = os.open("/dev/fuse", os.O_RDWR)
    _mount("dead", folder, "fuse", f"fd={device},rootmode=40000,user_id=0,group_id=0")


def mount_small_shared_memory(size: str = "200k") -> None:
    _mount("small", Path("/dev/shm"), "tmpfs", f"size={size}")


def _mount(name: str, folder: Path, kind: str, options: str) -> None:
    """Mount in a namespace of this process."""
    libc = ctypes.CDLL(None, use_errno=True)
    steps = (
        lambda: libc.unshare(_CLONE_NEWNS),
        lambda: libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None),
        lambda: libc.mount(name.encode(), bytes(folder), kind.encode(), 0, options.encode()),
    )
    for step in steps:
        if step():
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
