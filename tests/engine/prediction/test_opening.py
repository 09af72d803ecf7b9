"""Open networks predict as an evaluation does: images in any form, the options of the command, nothing compiled."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from datasets import camvid, fixed_crops
from datasets.reading import decode_image
from engine import assemble
from engine.checkpoint import files as checkpoint
from engine.checkpoint import recorded
from engine.prediction import evaluate, predictors
from engine.prediction.opening import open_checkpoint, open_network, predictor
from engine.prediction.programs import program_of
from engine.schema.evaluation import Prediction, Window
from engine.schema.segmentation import SegmentationRun
from engine.segmentation import inference
from engine.segmentation.batches import AtOnce
from keepless import InPlaceABN
from models.forward import Forward
from tests import trees
from tests.checkpoints import saved
from tests.host_reads import host_reads
from tests.runs import REPOSITORY, SHORT, checked, classification_config, run_config

CLASSES = [f"class {number}" for number in range(11)]


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    """A checkpoint of a segmentation network."""
    file = tmp_path_factory.mktemp("trained") / "net.pt"
    saved(file, run_config("data=camvid", "data.base_size=48"), CLASSES, palette=[[n, n, n] for n in range(11)])
    return file


def test_what_a_checkpoint_is_made_of_must_be_imported_before(file, tmp_path):
    """A command is given plugins=[…]; a Python program imports them itself."""
    state = checkpoint.load(file)
    state["config"] |= {"plugins": ["mine", "own.losses"], "head": {"name": "ocr", "depth": 1}}
    torch.save(state, tmp_path / "net.pt")
    problem = f"checkpoint {tmp_path / 'net.pt'}: head=ocr"
    needed = f"{problem} is registered by a module of your own: import mine, own.losses first"
    with pytest.raises(ValueError, match=f"^{re.escape(needed)}$"):
        open_network(tmp_path / "net.pt")
    needed = re.escape(f"{problem}: registered by plugins=[mine,own.losses], which is not given")
    with pytest.raises(ValueError, match=f"^{needed}$"):
        open_checkpoint(tmp_path / "net.pt", Prediction())


def test_the_example_in_python_runs(file, tmp_path, monkeypatch):
    """It predicts what an evaluation does; an array and a Pillow image are the same image as their file.

    Norms compile nothing: Inductor would need 10 seconds for every size of an image.
    """
    trees.picture(tmp_path / "street.jpg")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("keepless.norms.backends.CompiledBackend", lambda: pytest.fail("a compiled norm"))
    (example,) = re.findall(r"(?ms)^```python\n(from engine.*?)^```", (REPOSITORY / "docs" / "tour.md").read_text())
    ran: dict = {}
    exec(example.replace('"RUN"', repr(str(file))), ran)
    network = ran["network"]
    image = decode_image(tmp_path / "street.jpg")

    state = checkpoint.load(file)
    config = recorded.from_plain(state["config"], SegmentationRun)
    config.norm.backend = "eager"
    plain = assemble.network_of(config, len(CLASSES))
    plain.load_state_dict(state["network"])
    forward = assemble.forward(config, plain, torch.device("cpu"))
    views = inference.Views(config.data.base_size)
    expected = inference.predict(forward, torch.from_numpy(image).permute(2, 0, 1)[None], views)[0]
    assert np.array_equal(ran["ids"], expected) and len(np.unique(expected)) > 1
    assert np.array_equal(network.predict(image), expected)
    gray = image[..., 0]
    assert np.array_equal(network.predict(gray), network.predict(Image.fromarray(gray)))
    assert not network.training and not {type(module) for module in network.modules()} & {InPlaceABN}
    for wrong in (gray.astype(float), gray[..., None], Image.fromarray(gray.astype(np.float32)), None):
        with pytest.raises(ValueError, match="expected pixels of 8 bits, as a uint8 array"):
            network.predict(wrong)


def test_the_page_s_program_trains_and_scores_as_the_commands_do(tmp_path, monkeypatch):
    page = (REPOSITORY / "docs" / "training.md").read_text()
    (program,) = re.findall(r"(?s)```python\n([^`]*import train_seg.*?)```", page)
    words = (*SHORT, "trainer.steps=2", "trainer.epochs=null", "trainer.evaluate_images=null")
    program = program.replace('"data=folder", "data.root=DIR"', repr(words)[1:-1])
    program = program.replace("REPOSITORY", str(REPOSITORY))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    ran: dict = {}
    exec(program, ran)
    assert ran["state"]["step"] == 2 and ran["config"].optim.lr == 0.05
    assert ran["recorded"]["miou"] == ran["results"]["miou"]
    assert ran["scores"].keys() <= ran["results"].keys() and ran["scores"]["iou"].keys() == ran["results"]["iou"].keys()
    assert ran["scores"]["miou"] == pytest.approx(ran["results"]["miou"], abs=1e-4)
    dataset = assemble.dataset(ran["config"].data, "val")
    assert repr(dataset) == "SegmentationDataset(synthetic val: 8 images of 3 channels, 19 classes)"
    weights = sum(parameter.numel() for parameter in ran["network"].parameters())
    assert f"19 classes, images of 3 channels, {weights:,} parameters" in repr(ran["network"])
    with pytest.raises(ValueError, match="camvid val: 2 images .*: expected labels of the network's 19 classes"):
        evaluate(ran["network"], camvid(trees.camvid_folders(tmp_path / "camvid"), "val"))


def test_an_installed_package_of_the_name_of_ours_is_named(tmp_path):
    """As Hugging Face's: from it nothing of ours can be imported."""
    (tmp_path / "datasets").mkdir()
    (tmp_path / "datasets" / "__init__.py").touch()
    program = f"import sys; sys.path.append({str(REPOSITORY)!r}); import engine.prediction"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env={}, capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == (
        f"ImportError: the package datasets of this project lies in {REPOSITORY}, and Python finds "
        f'{tmp_path}/datasets/__init__.py: write sys.path.insert(0, "{REPOSITORY}") before any import of it, in place '
        f"of sys.path.append"
    )


def test_our_own_mistakes_keep_their_traceback(file, monkeypatch):
    monkeypatch.setattr(assemble, "views", lambda *_: {}["ours"])
    with pytest.raises(KeyError, match="ours"):
        open_network(file)


def test_a_prediction_without_finite_scores_is_an_error(file, tmp_path):
    trees.picture(tmp_path / "a.png")
    network = open_network(file, Prediction(device="cpu"))
    network.network.cls.weight.data.mul_(1e38)
    for predict in (network.predict, network.probabilities):
        with pytest.raises(FloatingPointError, match="pixels have no finite score; the network's values are too large"):
            predict(tmp_path / "a.png")


@pytest.mark.parametrize("views", [(), ("window.size=32", "tta.flip=true")])
def test_a_prediction_starts_without_a_wait_for_the_device(file, views, tmp_path):
    """Only the function that it returns waits."""
    options = checked("predict", f"checkpoint={file}", "input=a", "output=b", "device=cpu", *views)
    network = open_network(file, options)
    image = trees.picture(tmp_path / "a.png")
    for probabilities, expected in ((False, network.predict(image)), (True, network.probabilities(image))):
        with host_reads() as reads:
            finish = network.start_prediction(image, probabilities)
            assert reads == []
            assert np.array_equal(finish(), expected) and reads


def test_what_is_copied_to_the_device_is_pinned(file, tmp_path, monkeypatch):
    """Crops of an image are other memory than the image."""
    config = classification_config("data=image_folder", "data.crop_size=48", "data.resize=64", "body=resnext_tiny")
    saved(tmp_path / "net.pt", config, ["bee", "cat"])
    pinned = []
    copied = []
    move = Forward.normalised
    monkeypatch.setattr(predictors, "pinned", lambda image, device: pinned.append(image.clone()) or pinned[-1])
    monkeypatch.setattr(Forward, "normalised", lambda forward, images: copied.append(images) or move(forward, images))
    for network in (open_network(file), open_network(tmp_path / "net.pt", Prediction(view="ten_crop"))):
        network.predict(trees.picture(tmp_path / "a.png", (50, 72)))
    addresses = [[image.untyped_storage().data_ptr() for image in images] for images in (pinned, copied)]
    assert addresses[0] == addresses[1]


def test_windows_of_an_image_pass_together_as_far_as_memory_allows(file, tmp_path, monkeypatch):
    """auto depends on how many ranks the training had."""
    ranks = []
    windows = []
    predict = inference.predict
    monkeypatch.setattr(
        assemble, "at_once", lambda _, device, processes, views: ranks.append(processes) or AtOnce(8, views=views)
    )
    state = checkpoint.load(file)
    checkpoint.save(tmp_path / "net.pt", {**state, "random": {"cpu": [torch.zeros(1), torch.zeros(1)], "cuda": []}})
    network = open_network(tmp_path / "net.pt", Prediction(device="cpu", window=Window(size=32)))
    image = trees.picture(tmp_path / "a.png", (64, 200))
    expected = network.predict(image)

    def limited(*arguments, **options) -> torch.Tensor:
        windows.append(options["windows"])
        if windows[-1] > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        return predict(*arguments, **options)

    monkeypatch.setattr(inference, "predict", limited)
    assert np.array_equal(network.predict(image), expected)
    assert ranks == [2] and windows == [2, 1]


def test_images_that_cannot_be_levels_are_refused(file):
    """ToTensor's floats of 0 to 1 would be almost black images."""
    network = open_network(file, Prediction(device="cpu"))
    levels = torch.randint(256, (2, 3, 48, 48), dtype=torch.uint8)
    with torch.no_grad():
        expected = network(levels)
        for dtype in (torch.float32, torch.float64, torch.int64, torch.int16):
            assert torch.equal(network(levels.to(dtype)), expected)
        assert torch.equal(network((levels > 9).float()), network((levels > 9).byte()))  # levels of 0 and 1
        for images, message in (
            (levels / 255, r"values from 0 to 1: expected levels of 0 to 255, .*; multiply the images by 255"),
            (levels.long() - 128, "values from -128 to 127: expected levels of 0 to 255, .* normalises them itself$"),
        ):
            with pytest.raises(ValueError, match=message):
                network(images)


@torch.no_grad()
@pytest.mark.parametrize("size", [(64, 90), (200, 48), (20, 30)])
def test_a_classifier_sees_the_crop_of_an_evaluation_whatever_the_size(size, tmp_path):
    """The expected probabilities are computed in float64."""
    body = ("body=resnext_tiny", "body.base_channels=[8,8,16]", "body.stem_channels=8")
    config = classification_config("data=image_folder", "data.crop_size=48", "data.resize=64", *body)
    saved(tmp_path / "net.pt", config, ["bee", "cat", "dog"])
    network = assemble.network_of(config, 3)
    network.load_state_dict(checkpoint.load(tmp_path / "net.pt")["network"])
    mean, std = (255 * torch.tensor(values)[:, None, None] for values in (config.data.mean, config.data.std))
    trees.picture(tmp_path / "a.png", size)
    image = decode_image(tmp_path / "a.png")
    crop = fixed_crops(64, 48)(torch.from_numpy(image).movedim(2, 0))
    expected = network.double().eval()(((crop - mean) / std).double()[None])[0].softmax(0)
    center, ten = (open_network(tmp_path / "net.pt", Prediction(view=view)) for view in ("center", "ten_crop"))
    assert np.allclose(center.probabilities(image), expected, atol=1e-5) and center.predict(image) == expected.argmax()
    assert not np.allclose(ten.probabilities(image), expected, atol=1e-6)


def test_a_mean_image_is_subtracted_as_in_an_evaluation():
    config = classification_config("data=cifar10", "data.mean_image=true", "data.mean=[0,0,0]", "body=resnet32_cifar")
    mean = torch.rand(3, 32, 32, dtype=torch.float64) * 255
    forward = assemble.forward(config, torch.nn.Identity(), torch.device("cpu"))
    state = {"classes": ["a", "b"], "mean_image": mean}
    images = torch.randint(256, (2, 3, 32, 32), dtype=torch.uint8)
    network = predictor(config, Prediction(), state, forward)
    expected = forward(torch.from_numpy((images.numpy() - mean.numpy()).astype(np.float32)))
    torch.testing.assert_close(network(images), expected, rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match=r"subtracts a mean image of 32x32 pixels: give size=\[32,32\]"):
        program_of(network)
