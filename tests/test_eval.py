"""Evaluating a checkpoint: what an evaluation changes, and the files that it writes."""

import csv
import json
import re
import shutil
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from datasets import cityscapes, folder
from engine import assemble
from engine.assemble import tasks
from engine.checkpoint import files as checkpoint
from engine.configuration import config as cfg
from engine.schema.segmentation import SegmentationRun
from engine.segmentation import evaluation
from eval import evaluate
from tests import trees
from tests.checkpoints import saved
from tests.runs import SHORT, checked, classification_config, run_config
from train_seg import train


@pytest.fixture(scope="module")
def run_dir(drawn, tmp_path_factory) -> Path:
    """A short training of a network that predicts many classes: it starts from a random classifier."""
    path, start = tmp_path_factory.mktemp("run"), tmp_path_factory.mktemp("start") / "net.pt"
    torch.manual_seed(0)
    network = assemble.network_of(run_config(), 19)
    torch.nn.init.normal_(network.cls.weight)
    torch.save(network.state_dict(), start)
    options = ("data=cityscapes", f"data.root={drawn}", "trainer.steps=2", "optim.lr=1e-3")
    options += (f"init.weights={start}", "init.format=standard_bn", "trainer.evaluate_images=null")
    train(checked("train_seg", f"run_dir={path}", *SHORT, *options))
    return path


def evaluate_run(run_dir: Path, *overrides: str) -> dict:
    return evaluate(checked("eval", f"checkpoint={run_dir}", "workers=0", "device=cpu", *overrides))


def test_other_evaluations_have_results_of_their_own():
    for overrides, name in (
        (("data.split=val", "precision=float32", "data.antialias=true", "tta.scales=[1]", "tta.flip=false"), "results"),
        (("data.split=test",), "results_test"),
        (("data.root=elsewhere/streets",), "results_streets"),
        (("head.pooling_size=[3,5]",), "results_pooling3x5"),
        (("window.size=64", "window.overlap=0.5", "tta.flip=true"), "results_window64_overlap0.5_flip"),
        (("upsampling=stretched",), "results_stretched"),
    ):
        assert default_file("run/checkpoints/last.pt", *overrides) == f"run/{name}.json"
    assert default_file("run/checkpoints/last.pt") == "run/results.json"
    # As training evaluated two images, and eval.py evaluates all.
    few = run_config("trainer.evaluate_images=2")
    assert default_file("run/checkpoints/last.pt", config=few) == "run/results_all_images.json"
    assert default_file("run/checkpoints/best.pt") == "run/results_best.json"
    assert default_file("run/checkpoints/last.pt", step=8) == "run/results_step8.json"  # the run has not ended
    assert default_file("run/checkpoints/best.pt", step=8) == "run/results_best.json"
    assert default_file("somewhere/net.pt", "precision=bfloat16") == "somewhere/results_net_bfloat16.json"


def default_file(path: str, *overrides: str, step: int | None = None, config: SegmentationRun | None = None) -> str:
    options = checked("eval", f"checkpoint={path}", *overrides)
    return str(options.default_results_file(config or run_config(), step))


def test_what_an_evaluation_changes_reaches_the_results(run_dir, tmp_path):
    """tests/engine/test_every_key.py shows that each option is handed on."""
    plain = json.loads((run_dir / "results.json").read_text())
    one_view = {"window": None, "overlap": 0.25, "scales": [1.0], "flip": False}
    assert plain["views"] == one_view
    file = f"results={tmp_path / 'results.json'}"
    views = ("window.size=128", "window.overlap=0.5", "tta.scales=[0.7,1]", "tta.flip=true")
    first = evaluate_run(run_dir, "head.pooling_size=[2,2]", *views, file)
    assert torch.backends.cudnn.allow_tf32 and torch.backends.cuda.matmul.allow_tf32  # as in the training
    assert first["views"] == {"window": 128, "overlap": 0.5, "scales": [0.7, 1.0], "flip": True}
    assert cfg.flat(first["config"])["head.pooling_size"] == [2, 2]
    small = ("data.base_size=90", "data.antialias=false", "precision=bfloat16")
    second = evaluate_run(run_dir, *small, "upsampling=stretched", file)
    assert second["views"] == {**one_view, "upsampling": "stretched"}
    keys = ("data.base_size", "data.antialias", "trainer.precision")
    assert [cfg.flat(second["config"])[key] for key in keys] == [90, False, "bfloat16"]
    matrices = [results["confusion_matrix"] for results in (plain, first, second)]
    assert len({np.sum(matrix) for matrix in matrices}) == 1  # every pixel once
    assert len({str(matrix) for matrix in matrices}) == 3


@pytest.mark.table
@pytest.mark.parametrize(
    "override, message",
    [
        ("head.pooling_size=[30]", "head.pooling_size=[30]: expected 2 numbers: height, width"),
        ("results=.", "results=. is a folder: give another file"),
        ("data.split=nights", "nights"),
        ("window.size=100", "window.size=100: expected a multiple of the network's output stride 8, such as 104"),
        ("window.overlap=1", "window.overlap=1: expected the share of a side by which windows overlap, from 0 to 0.9"),
        ("window.overlap=0.5", "window.overlap=0.5 needs window.size=PIXELS"),
    ],
)
def test_wrong_values_are_refused_before_the_data_are_read(run_dir, override, message, monkeypatch):
    monkeypatch.setattr("eval.verify_with_progress", lambda *_: pytest.fail("the data were read"))
    with pytest.raises(ValueError, match=re.escape(message)):
        evaluate_run(run_dir, override)


def test_the_images_of_a_dataset_are_no_place_for_pictures(run_dir, drawn):
    """The next training would find images without labels. Where labels are called like images, they would be gone."""
    images, labels = (path.parent for path in cityscapes(drawn, "val").files[0][1:3])
    with pytest.raises(ValueError, match=f"overlays=.* lies in {images}, the images of a dataset"):
        evaluate_run(run_dir, f"overlays={images / 'new'}")
    with pytest.raises(ValueError, match=f"^predictions={labels} holds labels of the dataset, which would be replaced"):
        evaluate_run(run_dir, f"predictions={labels}")
    assert not (images / "new").exists()


def test_pictures_and_scores_replace_only_those_of_earlier_evaluations(run_dir, drawn, tmp_path):
    """The same command may run twice; a folder of pictures without a list is refused, and so are others' files."""
    pictures, results, table = tmp_path / "pictures", tmp_path / "results.json", tmp_path / "images.csv"
    for _ in range(2):
        evaluate_run(run_dir, f"predictions={pictures}", f"results={results}", f"per_image={table}")
    listed = json.loads((pictures / "written.json").read_text())["files"]
    assert [f"{entry.name}.png" for entry in cityscapes(drawn, "val").files] == listed
    (pictures / "written.json").unlink()
    for overrides, message in (
        ((f"predictions={pictures}",), f"predictions={pictures} holds {listed[0]} and 2 others, which would be"),
        ((f"predictions={pictures}", f"overlays={pictures}/."), "is also the folder of overlays: give two folders"),
        ((f"results={run_dir}/checkpoints/last.pt",), f"results={run_dir}/checkpoints/last.pt is the input: give"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            evaluate_run(run_dir, *overrides)
    for key, file in (("results", results), ("per_image", table)):
        file.write_text('{"classes": []}')
        with pytest.raises(ValueError, match=f"^{key}={file} was not written by this command, and would be lost"):
            evaluate_run(run_dir, f"{key}={file}")


def test_a_folder_without_a_list_of_classes_is_offered_the_checkpoint_s(tmp_path):
    """A list of new names would be refused. Ids that the network does not know are ignored."""
    root, names, ids = trees.folder(tmp_path / "data"), ["wood", "bärk", "rot"], [0, 1, 3]
    (root / "classes.json").unlink()
    palette = [[120, 80, 40], [0, 0, 9], [0, 90, 0]]
    saved(tmp_path / "net.pt", run_config(*SHORT, "data=folder"), names, palette=palette, label_ids=ids)
    with pytest.raises(ValueError, match="Copy it .* write the checkpoint's classes: ") as e:
        evaluate_run(tmp_path / "net.pt", f"data.root={root}")
    (root / "classes.json").write_text(str(e.value).partition("classes: ")[2])
    offered = folder(root, "val").table
    assert ([*offered.names], [*offered.official_ids], [*map(list, offered.palette)]) == (names, ids, palette)
    assert evaluate_run(tmp_path / "net.pt", f"data.root={root}")["iou"].keys() == {*names}


def test_a_bad_file_is_named_before_anything_is_predicted(run_dir, drawn, tmp_path):
    root = shutil.copytree(drawn, tmp_path / "streets")
    image = cityscapes(root, "val").files[-1].image
    image.write_bytes(image.read_bytes()[:200])
    with pytest.raises(ValueError, match=image.name):
        evaluate_run(run_dir, f"data.root={root}", f"predictions={tmp_path / 'predictions'}")
    assert not (tmp_path / "predictions").exists()


def test_files_have_official_ids_overlays_show_them_and_scores_of_images_add_up(run_dir, drawn, tmp_path):
    """The official script's scores are compared in tests/engine/segmentation/test_official_scores.py."""
    names = ("predictions", "overlays", "results.json", "per_image.csv")
    keys = [f"{name.partition('.')[0]}={tmp_path / name}" for name in names]
    results = evaluate_run(run_dir, *keys, "batch_size=2")
    dataset, confusion = cityscapes(drawn, "val"), np.zeros((19, 19), int)
    for entry, (image, label, _) in zip(dataset.files, dataset, strict=True):
        official_ids = cv2.imread(str(tmp_path / "predictions" / f"{entry.name}.png"), cv2.IMREAD_UNCHANGED)
        assert official_ids.dtype == np.uint8 and official_ids.shape == label.shape
        predicted = dataset.table.train_ids(official_ids)
        np.add.at(confusion, (label[label != 255], predicted[label != 255]), 1)
        picture = cv2.cvtColor(cv2.imread(str(tmp_path / "overlays" / f"{entry.name}.png")), cv2.COLOR_BGR2RGB)
        seen, *parts = np.split(picture.astype(int), 3, axis=1)
        assert np.array_equal(seen, image)
        for part, ids in zip(parts, (label, predicted), strict=True):
            shown = np.where((ids == 255)[..., None], image, 0.6 * dataset.table.colour(ids) + 0.4 * image)
            assert np.abs(part - shown).max() <= 1
    assert confusion.tolist() == results["confusion_matrix"] and len(np.unique(predicted)) > 1
    rows = [*csv.DictReader((tmp_path / "per_image.csv").read_text().splitlines())]
    assert [row["name"] for row in rows] == sorted(entry.name for entry in dataset.files)
    for name, iou in results["iou"].items():
        intersection, union = (sum(int(row[f"{part}_{name}"]) for row in rows) for part in ("intersection", "union"))
        assert iou == (intersection / union if union else None)


def test_images_of_one_size_pass_through_the_network_together(run_dir, tmp_path, monkeypatch):
    """For auto, eval.py reads from the checkpoint how many ranks trained."""
    passes = []
    ranks = []
    predict = evaluation.predict
    choose = tasks.at_once

    def counting(forward, images, *arguments, **options):
        passes.append(len(images))
        return predict(forward, images, *arguments, **options)

    monkeypatch.setattr(evaluation, "predict", counting)
    monkeypatch.setattr(tasks, "at_once", lambda *arguments: ranks.append(arguments[2]) or choose(*arguments))
    state = checkpoint.load(run_dir / "checkpoints" / "last.pt")
    checkpoint.save(tmp_path / "net.pt", {**state, "random": {"cpu": 3 * state["random"]["cpu"], "cuda": []}})
    evaluate_run(tmp_path / "net.pt", "batch_size=2")
    assert (passes, ranks) == ([2, 1], [3])


def test_the_batch_size_is_the_commands_or_else_the_trainings():
    for batch_size, expected, in_classification in (("null", 5, 7), ("8", 8, 8), ("auto", "auto", 7)):
        options = checked("eval", "checkpoint=a", f"batch_size={batch_size}")
        segmentation = run_config("trainer.evaluate_batch_size=5")
        classification = classification_config("trainer.evaluate_batch_size=7")
        options.apply_to(segmentation)
        options.apply_to(classification)
        assert segmentation.trainer.evaluate_batch_size == expected
        assert classification.trainer.evaluate_batch_size == in_classification
    for key, command in (("batch_size", ("eval", "checkpoint=a")), ("trainer.evaluate_batch_size", ("train_seg",))):
        for wrong in (0, 2.5, "all"):
            with pytest.raises(ValueError, match=f"^{key}={wrong}: expected auto, or a whole number, 1 or more"):
                checked(*command, f"{key}={wrong}")
