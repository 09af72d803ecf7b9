"""Which commit a record names."""

import subprocess

import pytest

from engine.records import provenance as module
from engine.records.provenance import provenance


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_REPOSITORY", tmp_path)
    (tmp_path / "docs").mkdir()
    for name in ("code.py", "README.md", "docs/record.json"):
        (tmp_path / name).write_text("1")
    settings = ("-c", "user.name=test", "-c", "user.email=test", "-c", "commit.gpgsign=false")
    for command in (("init", "-q"), ("add", "."), (*settings, "commit", "-q", "-m", "test")):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    return tmp_path


def test_a_record_names_its_commit_and_whether_the_code_has_changed(checkout):
    """Changed records and pages do not count: they are written between measurements."""
    commit = provenance()["commit"]
    assert len(commit) == 12
    for name in ("README.md", "docs/record.json"):
        (checkout / name).write_text("2")
    (checkout / "untracked.txt").write_text("1")
    assert provenance()["commit"] == commit
    (checkout / "code.py").write_text("2")
    assert provenance()["commit"] == f"{commit}-dirty"


def test_a_folder_that_is_no_checkout_has_no_commit(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_REPOSITORY", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert provenance()["commit"] is None
