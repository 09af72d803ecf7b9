"""The fake datasets of tests/trees.py, in a fresh folder for every test."""

from pathlib import Path

import pytest

from tests import trees


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


@pytest.fixture
def camvid_folders(tmp_path) -> Path:
    return trees.camvid_folders(tmp_path / "camvid")


@pytest.fixture
def coco_root(tmp_path) -> Path:
    return trees.coco_stuff(tmp_path / "coco")


@pytest.fixture
def vistas_root(tmp_path) -> Path:
    return trees.vistas(tmp_path / "vistas")
