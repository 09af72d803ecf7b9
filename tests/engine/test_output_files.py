"""Files stay inside the user's folder; an error about an unwritable folder names its key."""

import pytest

from engine.output_files import inside, writable_folder


def test_links_that_leave_the_folder_are_refused(tmp_path):
    folder, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    folder.mkdir(), elsewhere.mkdir()
    (folder / "city").symlink_to(elsewhere)
    (folder / "a.png").symlink_to(elsewhere / "a.png")
    for name in ("city/a.png", "a.png", "city", ".", ""):
        with pytest.raises(ValueError, match="outside of"):
            inside(folder, name)
    (tmp_path / "linked").symlink_to(folder)  # the user's own choice
    assert inside(tmp_path / "linked", "b.png") == folder / "b.png"


def test_a_folder_that_cannot_be_written_to_is_named_with_its_key(tmp_path):
    assert writable_folder("predictions", tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").touch()
    for folder, reason in ((tmp_path / "file", "File exists"), (tmp_path / "file" / "a", "Not a directory")):
        expected = rf"predictions: {folder} is not a writable folder \({reason}\); give another with predictions="
        with pytest.raises(ValueError, match=expected):
            writable_folder("predictions", folder)
