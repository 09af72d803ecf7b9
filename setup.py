"""The build of the `keepless` wheel; all its settings are in pyproject.toml."""

import shutil

from setuptools import setup
from setuptools.command.build import build


class CleanBuild(build):
    """setuptools packs what an earlier build has left, so every build starts from nothing."""

    def run(self) -> None:
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


setup(cmdclass={"build": CleanBuild})
