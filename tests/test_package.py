"""The wheel: pure, small and complete; the examples, recipes and scripts of its pages run."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from keepless import __version__
from tests.runs import REPOSITORY


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built of a copy of what is packed and lies beside it, in which an older build has left a file."""
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "LICENSE"):
        shutil.copy(REPOSITORY / name, source / name)
    for folder in ("keepless", "datasets"):
        shutil.copytree(REPOSITORY / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    left = source / "build" / "lib" / "keepless" / "gone.py"
    left.parent.mkdir(parents=True)
    left.write_text("")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--wheel-dir", built, source], check=True)
    (file,) = built.iterdir()
    return file


def test_the_wheel_holds_the_layers_and_nothing_else(wheel):
    assert wheel.name == f"keepless-{__version__}-py3-none-any.whl" and wheel.stat().st_size < 280_000
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    layers = REPOSITORY / "keepless"
    packed = {*layers.rglob("*.py"), *(layers / name for name in ("py.typed", "README.md", "CHANGELOG.md"))}
    assert names == {file.relative_to(REPOSITORY).as_posix() for file in packed}
    (metadata,) = (name for name in zipfile.ZipFile(wheel).namelist() if name.endswith("METADATA"))
    lines = zipfile.ZipFile(wheel).read(metadata).decode().splitlines()
    needed = [line for line in lines if line.startswith("Requires-Dist") and "extra ==" not in line]
    assert needed == ["Requires-Dist: torch>=2.11"]
    assert "Project-URL: Paper, https://arxiv.org/abs/1712.02616" in lines
    page = "\n".join(lines)
    links = re.findall(r"\]\(([^)]+)\)", page)  # elsewhere there are no pages beside it
    words = re.findall(r"\[([^]]+)\]\((?!https?:|#)", (layers / "README.md").read_text())
    assert words and all(word in page for word in words)
    assert links and all(link.startswith(("https:", "#")) for link in links)


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> dict[str, str]:
    """An environment with the wheel's files, and without the checkout."""
    folder = tmp_path_factory.mktemp("installed")
    zipfile.ZipFile(wheel).extractall(folder)
    packages = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    return {"PYTHONPATH": packages, "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}


def run(program: str, folder: Path, environment: dict[str, str]) -> str:
    (folder / "program.py").write_text(program)
    command = [sys.executable, "program.py"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name, number", [("keepless/README", 1), ("docs/keepless", 2), ("docs/layers", 4)])
def test_the_examples_of_its_pages_run(name, number, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    examples = re.findall(r"(?ms)^```python\n(.*?)^```", (REPOSITORY / f"{name}.md").read_text())
    assert len(examples) == number
    exec("\n".join(examples), {})


ISSUES = (REPOSITORY / "docs" / "pytorch_issues.md").read_text()
SCRIPTS = dict(re.findall(r"(?ms)^\[((?:rfcs )?\d+)\]\(https:.*?^```python\n(.*?)^```", ISSUES))


@pytest.mark.slow
@pytest.mark.parametrize("issue", SCRIPTS)
def test_each_issue_of_pytorch_that_a_page_answers_has_a_script_that_runs_alone(issue, tmp_path, monkeypatch):
    assert len(SCRIPTS) == ISSUES.count("\n## ") == ISSUES.count("/issues/") == 6
    monkeypatch.chdir(tmp_path)
    exec(SCRIPTS[issue], {"__name__": "__main__"})


SMALL = """
import torch
from keepless import recompute_activations
from keepless.saved import kept_bytes
if PLAIN:
    recompute_activations = lambda network, budget=None: network
torch.manual_seed(0)
images, masks = torch.randn(4, 3, 64, 64), torch.randint(3, (4, 64, 64))
network = torch.nn.Sequential(
    torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.SiLU(), torch.nn.AdaptiveAvgPool2d(1),
    torch.nn.Flatten(), torch.nn.Linear(4, 3),
)
"""
AROUND = {  # what a recipe needs before and after it
    "lightning": (
        """
import lightning
class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.network = network
    def training_step(self, batch, number):
        return self.network(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)
""",
        """
off = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False)
trainer = lightning.Trainer(max_steps=2, accelerator="cpu", callbacks=[Recompute()], **off)
trainer.fit(Module(), torch.utils.data.DataLoader(images, batch_size=2))
""",
    ),
    "transformers": (
        """
import transformers
options = dict(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=3)
network = transformers.ResNetForImageClassification(transformers.ResNetConfig(**options))
data = [{"pixel_values": image, "labels": torch.tensor(number % 3)} for number, image in enumerate(images)]
""",
        """
options = dict(max_steps=2, per_device_train_batch_size=2, report_to=[], use_cpu=True, save_strategy="no")
arguments = transformers.TrainingArguments("runs", disable_tqdm=True, **options)
transformers.Trainer(network, arguments, train_dataset=data, callbacks=[Recompute()]).train()
""",
    ),
    "timm": ("import timm\nimport timm.optim\nloader = [(images, torch.arange(4))] * 2\n", ""),
    "segmentation_models_pytorch": ("import segmentation_models_pytorch as smp\n", ""),
}
RESULT = """
network.train()
gradients = [p.grad for p in network.parameters() if p.grad is not None]
values = [*network.state_dict().values(), *gradients]
output = lambda: getattr(result := network(images), "logits", result)
print(sum(value.double().sum().item() for value in values).hex(), kept_bytes(network, output, [images]))
"""


@pytest.mark.parametrize("package", [pytest.param(name, marks=pytest.mark.slow) for name in AROUND])
def test_the_recipes_of_its_page_train_the_same_in_less_memory(installed, tmp_path, package):
    """Weights and gradients are those without the recipe's line, to the bit, with the real package."""
    page = (REPOSITORY / "docs" / "keepless.md").read_text()
    (recipe,) = re.findall(rf"(?ms)^```python {package}\n(.*?)^```", page)
    assert 3 <= len(recipe.splitlines()) <= 5
    before, after = AROUND[package]
    results = []
    for plain in (True, False):
        program = SMALL.replace("PLAIN", str(plain)) + before + recipe + after + RESULT
        results.append(run(program, tmp_path, installed).split()[-2:])
    (expected, all_bytes), (loss, few_bytes) = results
    assert loss == expected and int(few_bytes) < 0.7 * int(all_bytes)


OLD = """
import sys
import types
sys.modules["torch"] = types.SimpleNamespace(__version__="2.5.1")  # whatever else is asked of it raises another error
try:
    import keepless
except ImportError as error:
    print(error)
"""


def test_a_pytorch_that_is_too_old_is_refused_first(installed, tmp_path):
    printed = run(OLD, tmp_path, installed)
    assert printed == "keepless needs torch 2.11 or later, and found 2.5.1: pip install -U torch\n"
