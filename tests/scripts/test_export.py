"""Exported files: complete without this code, with all that their readers have to know."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from engine.checkpoint import files as checkpoint
from engine.prediction import open_network
from engine.prediction.opening import open_checkpoint
from engine.schema.evaluation import Prediction
from scripts.export import export, metadata
from tests.checkpoints import saved
from tests.runs import checked, classification_config, run_config

TINY = ("body=resnet_cifar_tiny", "body.structure=[1,1,1]", "body.base_channels=[8,8]", "body.stem_channels=8")
HEAD = ("head.hidden_channels=8", "head.out_channels=8", "head.dilations=[2]")
NAMES = [f"class {number} ä" for number in range(5)]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    palette = [[number, 2 * number, 3] for number in range(5)]
    for config, keys in (
        (run_config("data=camvid", "data.base_size=96", *TINY, *HEAD), {"palette": palette}),
        (classification_config("data=image_folder", "data.crop_size=48", "data.resize=64", *TINY), {}),
    ):
        saved(folder / f"{config.task}.pt", config, NAMES, **keys, step=7)
    four = ("data.channels=4", "data.mean=[0.5,0.4,0.3,0.2]", "data.std=[0.2,0.2,0.2,0.3]")
    saved(folder / "four.pt", run_config("data=folder", *four, *TINY, *HEAD), NAMES, palette=palette, step=7)
    return folder


def run(source, output, *overrides: str) -> dict:
    return export(checked("export", f"checkpoint={source}", f"output={output}", *overrides))


READER = """
import json, sys, torch
file, extra = sys.argv[1], {"network.json": ""}
network = torch.export.load(f"{file}.pt2", extra_files=extra).module()
for one, logits in zip(*torch.load(f"{file}.images")):
    torch.testing.assert_close(network(one), logits, rtol=0, atol=1e-4 * logits.abs().max().item())
print(json.dumps(json.loads(extra["network.json"])))
ours = {"engine", "keepless", "models", "datasets", "scripts", "hydra", "torchvision"} & set(sys.modules)
assert not ours, ours
"""


@pytest.mark.slow
@pytest.mark.parametrize("task", ["segmentation", "classification"])
def test_an_export_runs_in_a_fresh_process_with_torch_alone(checkpoints, tmp_path, task):
    """Images have other sizes than the export's example; the metadata comes with the file."""
    facts = run(checkpoints / f"{task}.pt", tmp_path / "net.pt2")
    network = open_network(checkpoints / f"{task}.pt")
    images = [255 * torch.rand(size) for size in ((1, 3, 57, 81), (3, 3, 40, 96))]
    with torch.no_grad():
        torch.save((images, [network(image) for image in images]), tmp_path / "net.images")
    command = [sys.executable, "-I", "-W", "ignore", "-c", READER, str(tmp_path / "net")]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert process.returncode == 0, process.stderr
    assert json.loads(process.stdout) == facts
    assert facts["input"] == {"dtype": "float32", "shape": ["N", 3, "H", "W"], "colours": "RGB", "levels": [0, 255]}
    assert facts["classes"] == NAMES and facts["step"] == 7
    with pytest.raises(ValueError, match="net.pt2 is a program of torch.export, such as scripts.export makes"):
        open_network(tmp_path / "net.pt2")
    if task == "classification":
        assert facts["sizes"] == {"resize": 64, "crop_size": 48} and facts["palette"] is None
    else:
        assert (facts["sizes"]["base_size"], facts["ignore_index"], facts["palette"][4]) == (96, 255, [4, 8, 3])


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("argmax=true",), ("precision=float16",), ("size=[40,64]",)])
@pytest.mark.parametrize("task", ["segmentation", "classification", "four"])
def test_an_onnx_model_computes_the_same_at_other_sizes(checkpoints, task, options, tmp_path):
    """The command compares it in onnxruntime before it writes it."""
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    facts = run(checkpoints / f"{task}.pt", tmp_path / "net.onnx", "format=onnx", *options)
    session = onnxruntime.InferenceSession(str(tmp_path / "net.onnx"), providers=["CPUExecutionProvider"])
    sides = [40, 64] if "size=[40,64]" in options else ["height", "width"]
    channels = 4 if task == "four" else 3
    assert session.get_inputs()[0].shape == ["batch", channels, *sides]
    assert json.loads(session.get_modelmeta().custom_metadata_map["network"]) == facts
    images = 255 * torch.rand(1, channels, 40, 64)
    output = torch.from_numpy(session.run(None, {"images": images.numpy()})[0])
    expected = open_network(checkpoints / f"{task}.pt")(images)
    if options == ("argmax=true",):
        assert (output == expected.argmax(dim=1)).double().mean() > 0.99
    else:
        limit = 2e-2 if "precision=float16" in options else 1e-4
        assert (output - expected).abs().max() < limit * expected.abs().max()


def test_the_metadata_holds_the_ids_that_labels_and_predictions_have(checkpoints, tmp_path):
    """Classes in the output are positions: an ignored id shifts those after it."""
    state = checkpoint.load(checkpoints / "segmentation.pt")
    checkpoint.save(tmp_path / "net.pt", {**state, "label_ids": [0, 1, 3, 7, 12]})
    options = checked("export", "checkpoint=net.pt", "output=net.pt2", "argmax=true")
    for file, ids in ((tmp_path / "net.pt", [0, 1, 3, 7, 12]), (checkpoints / "classification.pt", None)):
        opened = open_checkpoint(file, Prediction(device="cpu"))
        facts = json.loads(metadata(opened, options))
        assert (facts["label_ids"], facts["classes"], facts["output"]) == (ids, NAMES, "classes")


def test_what_cannot_be_exported_is_refused(checkpoints, tmp_path, monkeypatch):
    source = checkpoints / "segmentation.pt"
    for overrides, message in (
        (("format=onnx", "precision=bfloat16"), "precision=bfloat16 with format=onnx"),
        ((f"output={source}",), r"give output=….pt2, a program of torch.export"),
    ):
        with pytest.raises(ValueError, match=message):
            run(source, tmp_path / "net.pt2", *overrides)
    monkeypatch.setattr("scripts.export.program_of", lambda *_: None)
    monkeypatch.setattr("scripts.export.exported_program", lambda *_: b"")
    monkeypatch.setattr("torch.export.load", lambda _: SimpleNamespace(module=lambda: None))
    monkeypatch.setattr("scripts.export.largest_difference", lambda *_: 1e-3)
    with pytest.raises(ValueError, match="differs by 1.0e-03; expected less than 0.0001: give size="):
        run(source, tmp_path / "net.pt2")
    assert not (tmp_path / "net.pt2").exists()


@pytest.mark.parametrize("output", ["net.torchscript", "net.engine", "net.tflite", "net.mlmodel", "net", "net.pt"])
def test_a_name_of_another_format_is_refused_with_what_is_written(output):
    with pytest.raises(ValueError, match="give output=….pt2, a program of torch.export, or format=onnx output=….onnx"):
        checked("export", "checkpoint=net.pt", f"output={output}")
