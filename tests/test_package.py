"""The wheel: pure, small, complete, and usable beside another project's folders."""

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.runs import REPOSITORY

PROGRAM = """
import torch, models, datasets
from keepless import InPlaceABN, recompute_activations, to_standard, __version__
assert models.OWN and datasets.OWN
network = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), InPlaceABN(4), torch.nn.Conv2d(4, 4, 3), torch.nn.GELU())
recompute_activations(network)
network(torch.randn(2, 3, 8, 8)).square().mean().backward()
assert all(parameter.grad is not None for parameter in network.parameters())
to_standard(network)
print(__version__)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy in which an older build has left a file."""
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "setup.py", "LICENSE", "docs/layers.md"):
        (source / name).parent.mkdir(exist_ok=True)
        shutil.copy(REPOSITORY / name, source / name)
    shutil.copytree(REPOSITORY / "models" / "layers", source / "models" / "layers")
    left = source / "build" / "lib" / "keepless" / "gone.py"
    left.parent.mkdir(parents=True)
    left.write_text("")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--wheel-dir", built, source], check=True)
    (file,) = built.iterdir()
    return file


def test_the_wheel_holds_the_layers_and_nothing_else(wheel):
    assert wheel.name.endswith("-py3-none-any.whl") and wheel.stat().st_size < 200_000
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    layers = REPOSITORY / "models" / "layers"
    assert names == {
        f"keepless/{file.relative_to(layers).as_posix()}"
        for file in layers.rglob("*")
        if file.suffix == ".py" or file.name == "py.typed"
    }
    (metadata,) = (name for name in zipfile.ZipFile(wheel).namelist() if name.endswith("METADATA"))
    lines = zipfile.ZipFile(wheel).read(metadata).decode().splitlines()
    needed = [line for line in lines if line.startswith("Requires-Dist") and "extra ==" not in line]
    assert needed == ["Requires-Dist: torch>=2.6"]


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> dict[str, str]:
    """An environment in which the wheel is installed, and the checkout is not."""
    folder = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", folder, wheel], check=True)
    return {"PYTHONPATH": str(folder), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}


def run(program: str, folder: Path, environment: dict[str, str]) -> str:
    (folder / "program.py").write_text(program)
    command = [sys.executable, "program.py"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_examples_of_its_page_run(installed, tmp_path):
    page = (REPOSITORY / "docs" / "layers.md").read_text()
    examples = re.findall(r"(?ms)^```python\n(.*?)^```", page)
    assert len(examples) == 5
    run("\n".join(examples), tmp_path, installed)


def test_a_project_with_folders_of_the_same_names_trains_a_step(wheel, installed, tmp_path):
    for name in ("models", "datasets"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("OWN = True")
    assert wheel.name.startswith(f"keepless-{run(PROGRAM, tmp_path, installed).strip()}-")


OLD = """
import torch
torch.__version__ = "2.5.1"
try:
    import keepless
except ImportError as error:
    print(error)
"""


def test_a_pytorch_that_is_too_old_is_refused_first(installed, tmp_path):
    printed = run(OLD, tmp_path, installed)
    assert printed == "keepless needs torch 2.6 or later, and found 2.5.1: pip install -U torch\n"
