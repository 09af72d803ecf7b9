"""The cache folder: where it is, and what killed processes leave there."""

import os
import signal
from multiprocessing import get_context

import cv2
import numpy as np
import pytest

from datasets import camvid, synthetic
from datasets.cache import cache_folder, read_arrays, write_arrays


def test_a_user_without_a_home_has_a_cache_in_the_folder_for_temporary_files(tmp_path, monkeypatch):
    """Containers may run as a user without HOME and without a passwd entry."""
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "inplace-abn-segmentation"
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert cache_folder() == tmp_path / f"inplace-abn-segmentation-{os.getuid()}"
    with pytest.raises(ValueError, match="^~/gone is not an existing folder"):
        camvid("~/gone", "train")


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


def killed(target, *arguments: str) -> None:
    process = get_context("fork").Process(target=target, args=arguments)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def test_what_killed_processes_left_is_removed(cache):
    killed(dies_while_it_draws)
    folder = next(cache_folder().glob("synthetic-*"))
    assert [path.name[:7] for path in folder.iterdir()] == [".1-1-0-"]
    assert len(synthetic(None, "train", images=(1, 1))) == 1
    assert [path.name for path in folder.iterdir()] == ["1-1-0"]
    file = cache_folder() / "key" / "index.npz"
    killed(dies_while_it_saves, "key")
    assert [path.name[:7] for path in file.parent.iterdir()] == [".index-"]
    write_arrays(file, {"a": np.ones(3)})
    assert [path.name for path in file.parent.iterdir()] == ["index.npz"]
    assert read_arrays(file, ["a"])[0].tolist() == [1, 1, 1]
