"""Git repositories of a test."""

import subprocess
from pathlib import Path


def committed(folder: Path) -> Path:
    """Make a folder a repository with all of its files in one commit; returns it."""
    settings = ("-c", "user.name=test", "-c", "user.email=test", "-c", "commit.gpgsign=false")
    for command in (("init", "-q"), ("add", "."), (*settings, "commit", "-q", "-m", "test")):
        subprocess.run(["git", *command], cwd=folder, check=True)
    return folder
