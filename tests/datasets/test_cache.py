"""The cache folder: where it is, and what killed processes leave there."""

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import cv2
import numpy as np
import pytest

from datasets import cache, camvid, index_classes, inspect, synthetic, verify
from datasets.cache import alone_in, cache_folder, read_arrays, write_arrays
from engine import assemble
from engine.schema.data import SyntheticData

OTHER = 65534  # a user id


@pytest.fixture
def shared(monkeypatch):
    """A folder for temporary files of all users; this one has no home, as in some containers."""
    folder = Path(tempfile.mkdtemp())  # not below the test's own folder, which others cannot enter
    folder.chmod(0o1777)
    for name in ("XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    monkeypatch.setattr(cache, "tempfile", SimpleNamespace(gettempdir=lambda: str(folder)))
    yield folder
    shutil.rmtree(folder)


def exit_code(function: Callable[..., object], *arguments: object) -> int | None:
    process = get_context("fork").Process(target=function, args=arguments)
    process.start()
    process.join()
    return process.exitcode


def as_other(function: Callable[[], object]) -> None:
    """To be called in a process of another user."""
    os.setgroups([])
    os.setresgid(OTHER, OTHER, OTHER)
    os.setresuid(OTHER, OTHER, OTHER)
    function()


def test_the_cache_is_in_the_home_or_else_in_a_private_folder(tmp_path, shared, monkeypatch):
    """Containers may run as a user without HOME and without a passwd entry."""
    folder = shared / f"inplace-abn-segmentation-{os.getuid()}"
    assert cache_folder() == folder and folder.stat().st_mode & 0o777 == 0o700
    for mode, is_private in ((0o755, False), (0o730, False), (0o2700, True)):  # a folder may be of its parent's group
        folder.chmod(mode)
        assert cache_folder() == (folder if is_private else None)
    with pytest.raises(ValueError, match="^~/gone is not an existing folder"):
        camvid("~/gone", "train")
    shared.chmod(0o777)  # without the sticky bit, anybody may replace it
    assert cache_folder() is None
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "inplace-abn-segmentation"


@pytest.mark.skipif(os.getuid() != 0, reason="only root may start a process of another user")
@pytest.mark.parametrize("trap", ["link", "folder", "file in ours"])
def test_what_another_user_put_in_place_of_the_cache_is_not_used(trap, shared, camvid_folders, tmp_path, monkeypatch):
    """A link led to the removal of all hidden files where it led; a foreign dataset was trained on.

    Without a cache checks run each time, and what needs it names its key.
    """
    folder, victim = shared / f"inplace-abn-segmentation-{os.getuid()}", tmp_path / "victim"
    (victim / "synthetic-streets-1").mkdir(parents=True)
    (victim / "synthetic-streets-1" / ".git").write_text("mine")
    if trap == "file in ours":
        folder.mkdir()
        folder.chmod(0o777)
    places = {"link": lambda: folder.symlink_to(victim), "folder": folder.mkdir, "file in ours": (folder / "a").touch}
    assert exit_code(as_other, places[trap]) == 0
    assert cache_folder() is None
    calls, check = [], sys.modules[verify.__module__]
    monkeypatch.setattr(
        check, "inspect", lambda *arguments, **options: calls.append(1) or inspect(*arguments, **options)
    )
    for _ in range(2):
        verify(camvid(camvid_folders, "train"))
    assert len(calls) == 2
    reason = "no cache folder: this user has no home"
    with pytest.raises(ValueError, match=f"^data.split=train: data.root=None .give data.root=DIR.: .*{reason}"):
        assemble.dataset(SyntheticData(), "train", draw=True)
    with pytest.raises(ValueError, match=f"^the class index .*{reason}.* give sampler.folder=DIR"):
        index_classes(camvid(camvid_folders, "train"), folder_key="sampler.folder")
    assert (victim / "synthetic-streets-1" / ".git").read_text() == "mine"
    assert not (folder / "class-index").exists()


def test_only_what_was_left_of_the_same_file_is_removed(tmp_path):
    """Links are not followed, neither to the folder nor in it."""
    folder, linked = tmp_path / "folder", tmp_path / "other"
    for name in (".a-left/b/c", ".a-b", ".ab", ".b-c", "a-b", ".git/config"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    shutil.copytree(folder, linked)
    (folder / ".a-left" / "link").symlink_to(linked)
    (folder / ".a-link").symlink_to(linked)
    (tmp_path / "link").symlink_to(linked)
    for path in (folder, tmp_path / "link"):
        with alone_in(path, ".a-"):
            pass
    assert {path.name for path in folder.iterdir()} == {".ab", ".b-c", "a-b", ".git"}
    assert len([*linked.rglob("*")]) == 9


def dies_while_it_draws() -> None:
    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cv2, "imencode", die)
        synthetic(None, "train", images=(1, 1))


def dies_while_it_saves(folder: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        write_arrays(cache_folder() / folder / "index.npz", {"a": np.zeros(3)})


def test_what_killed_processes_left_is_removed(cache):
    assert exit_code(dies_while_it_draws) == -signal.SIGKILL
    folder = next(cache_folder().glob("synthetic-*"))
    assert [path.name[:7] for path in folder.iterdir()] == [".1-1-0-"]
    assert len(synthetic(None, "train", images=(1, 1))) == 1
    assert [path.name for path in folder.iterdir()] == ["1-1-0"]
    file = cache_folder() / "key" / "index.npz"
    assert exit_code(dies_while_it_saves, "key") == -signal.SIGKILL
    assert [path.name[:7] for path in file.parent.iterdir()] == [".index-"]
    write_arrays(file, {"a": np.ones(3)})
    assert [path.name for path in file.parent.iterdir()] == ["index.npz"]
    assert read_arrays(file, ["a"])[0].tolist() == [1, 1, 1]
