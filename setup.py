"""The build of the `keepless` wheel; its other settings are in pyproject.toml."""

import re
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build import build


class CleanBuild(build):
    """setuptools packs what an earlier build has left, so every build starts from nothing."""

    def run(self) -> None:
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


# Links to other pages lead nowhere outside of a checkout: their words stay.
page = re.sub(r"\[([^]]+)\]\((?!https?:|#)[^)]+\)", r"\1", Path("keepless/README.md").read_text(encoding="utf-8"))
setup(cmdclass={"build": CleanBuild}, long_description=page, long_description_content_type="text/markdown")
