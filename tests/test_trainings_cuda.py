"""Trainings on a CUDA device: `make test PYTEST="-m gpu"`. The same tests run on a CPU, marked slow."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import Image

from engine.checkpoint import files as checkpoint
from engine.process.transfers import HostCopy, prefetched
from engine.training import loop
from scripts.predict import predict
from tests.cuda import NEEDS_CUDA
from tests.runs import SHORT, checked
from train_seg import train

each_device = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=NEEDS_CUDA)]
)


def trained(run_dir: Path, device: str, *overrides: str) -> dict[str, torch.Tensor]:
    steps = () if any(word.startswith("trainer.steps=") for word in overrides) else ("trainer.steps=2",)
    train(checked("train_seg", f"run_dir={run_dir}", *SHORT, *steps, *overrides, f"trainer.device={device}"))
    return checkpoint.load(run_dir / "checkpoints" / "last.pt")["network"]


@pytest.fixture
def little_memory(monkeypatch):
    """A function that leaves a device too little memory for a step; a CPU is said to have none."""

    def leave(device: str) -> None:
        if device == "cuda":
            torch.cuda.empty_cache()
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**26) / total)
        else:
            full = Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory"))
            monkeypatch.setattr(loop, "accumulate_gradients", full)

    yield leave
    if torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(1.0)


@each_device
def test_a_host_copy_holds_the_values_of_its_moment(device):
    """The next step writes over the weights, and another thread waits for the copy."""
    state = {"weights": [torch.full((64, 2**16), float(number), device=device) for number in range(4)], "step": 7}
    copied = HostCopy(state)
    for weight in state["weights"]:
        weight.fill_(-1.0)
    with ThreadPoolExecutor(1) as thread:
        values = thread.submit(copied.wait).result()
    assert values["step"] == 7
    for number, weight in enumerate(values["weights"]):
        assert weight.device.type == "cpu" and weight.is_pinned() == (device == "cuda")
        assert torch.equal(weight, torch.full_like(weight, number))


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=NEEDS_CUDA)])
def test_prefetched_minibatches_equal_the_loader_s(device):
    minibatches = [{"image": torch.full((1000,), n).pin_memory(), "name": str(n)} for n in range(20)]
    moved = prefetched(minibatches, torch.device(device))
    seen = [(minibatch["image"].sum(), minibatch["name"]) for minibatch in moved]
    assert [(total.item(), name) for total, name in seen] == [(1000 * n, str(n)) for n in range(20)]


@each_device
def test_a_full_device_ends_a_training_with_advice(tmp_path, device, little_memory):
    little_memory(device)
    crops = ("data.crop_size=512", "data.crops_per_minibatch=8") if device == "cuda" else ()
    with pytest.raises(MemoryError, match="out of memory in step 1 with . crops of .* pixels at a time on this device"):
        trained(tmp_path, device, *crops)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=NEEDS_CUDA)])
def test_a_compiled_training_moves_the_weights_as_the_eager_one(tmp_path, device):
    """tests/engine/process/test_distributed.py compiles on CPUs."""
    options = ("data.crops_per_minibatch=4", "optim.lr=1e-3", "norm.backend=auto")
    eager = trained(tmp_path / "eager", device, *options)
    compiled = trained(tmp_path / "compiled", device, *options, "trainer.compile=true")
    distance = sum((compiled[name] - weight).norm() for name, weight in eager.items() if weight.is_floating_point())
    assert distance / sum(weight.norm() for weight in eager.values() if weight.is_floating_point()) < 1e-3


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=NEEDS_CUDA)])
def test_a_network_predicts_the_same_on_every_device(tmp_path, device):
    """Nearly all pixels have the same class: where two are as likely, rounding decides."""
    trained(tmp_path / "run", device)
    images = tmp_path / "images"
    images.mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (64, 96, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(images / "a.png")
    predictions = {}
    for name in ("cpu", device):
        words = (f"checkpoint={tmp_path / 'run'}", f"input={images}", f"output={tmp_path / name}", f"device={name}")
        (file, *_) = predict(checked("predict", *words))
        predictions[name] = np.asarray(Image.open(file))
    assert predictions[device].shape == (64, 96) and (predictions[device] == predictions["cpu"]).mean() > 0.99
