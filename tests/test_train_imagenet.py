"""Classification on the engine of segmentation: what docs/training.md promises holds for it too."""

import importlib
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torchvision.transforms import CenterCrop, Resize, TenCrop
from torchvision.transforms.functional import pil_to_tensor

from datasets import cifar10, shapes
from engine import assemble, prediction
from engine.checkpoint import files as checkpoint
from engine.classification import accuracy
from engine.classification.accuracy import evaluate_split
from engine.prediction import open_network
from engine.process.console import make_console, progress_bar
from engine.process.distributed import World
from engine.schema.keys import refuse_other_tasks
from eval import evaluate
from keepless import ABN
from models.bodies import resnext101
from models.forward import Forward
from tests.datasets import classification_trees
from tests.datasets.classification_trees import WNIDS
from tests.faults.runs import last_of
from tests.host_reads import host_reads
from tests.ranks import Ranks
from tests.runs import SHORT_SHAPES, checked, classification_config
from train_imagenet import train

IMAGES = importlib.import_module("datasets.shapes").IMAGES  # the package exports a function of the module's name


def train_shapes(run_dir: Path, *overrides: str) -> dict:
    return train(checked("train_imagenet", *SHORT_SHAPES, f"run_dir={run_dir}", *overrides))


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, dict]:
    """The directory and the results of a run that learns forty shapes by heart, and is evaluated on them."""
    run_dir = tmp_path_factory.mktemp("shapes") / "run"
    plain = ("data.crops_per_minibatch=20", "data.padding=0", "data.flip=0", "optim.lr=0.05", "trainer.steps=60")
    on_them = ("data.val_split=train", "trainer.evaluate_images=40", "trainer.log_every_steps=20")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(IMAGES, "train", 40)
        return run_dir, train_shapes(run_dir, *plain, *on_them)


def test_a_classifier_learns_and_leaves_a_run_directory(trained):
    """Chance would be right once in eight times."""
    run_dir, results = trained
    assert json.loads((run_dir / "results.json").read_text()) == results
    assert 0.75 < results["top1"] <= results["top5"] <= 1
    assert (results["dataset"], results["split"], results["images"]) == ("shapes", "train", 40)
    state = checkpoint.load(last_of(run_dir))
    assert state["task"] == "classification" and not {"palette", "mean_image"} & state.keys()
    assert len(results["accuracy"]) == 8 and sum(map(sum, results["confusion_matrix"])) == 40
    right = sum(row[label] for label, row in enumerate(results["confusion_matrix"]))
    assert results["top1"] == right / 40
    log = (run_dir / "log.txt").read_text()
    assert "val top-1" in log and "data.val_split=train: " in log
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert {"top1", "top5"} <= next(record for record in records if record["kind"] == "val").keys()


def test_a_program_scores_a_classifier_as_the_command_does(trained, monkeypatch):
    monkeypatch.setitem(IMAGES, "train", 40)
    network = open_network(last_of(trained[0]))
    results = prediction.evaluate(network, shapes(None, "train"))
    assert {"top1", "top5"} <= results.keys() and results.items() <= trained[1].items()


@pytest.mark.slow
def test_an_evaluation_waits_as_often_for_twenty_minibatches_as_for_one(trained):
    reads_of_runs = []
    for batch_size in (200, 10):
        options = (f"checkpoint={last_of(trained[0])}", "data.split=val", "workers=0", f"batch_size={batch_size}")
        with host_reads() as reads:
            evaluate(checked("eval", *options))
        reads_of_runs.append(sorted(reads))
    few, many = reads_of_runs
    assert few == many and sum("classification/accuracy.py" in read for read in few) > 0, reads_of_runs


def trained_and_evaluated_by_a_rank(rank: int, run_dir: str) -> dict:
    train_shapes(Path(run_dir), "trainer.steps=3", "trainer.ema_decay=0.5", "norm.sync=true")
    options = (f"checkpoint={last_of(Path(run_dir))}", "workers=0", f"results={run_dir}/together.json")
    return evaluate(checked("eval", *options))


@pytest.mark.slow
def test_two_processes_train_and_evaluate_together(tmp_path):
    """Each of the 200 images is evaluated once."""
    pair = Ranks(2, tmp_path)
    together = pair.run(trained_and_evaluated_by_a_rank, str(tmp_path))
    pair.stop()
    assert not any(isinstance(result, Exception) for result in together), together
    alone = evaluate(checked("eval", f"checkpoint={last_of(tmp_path)}", "workers=0"))
    assert alone["images"] == sum(map(sum, alone["confusion_matrix"])) == 200
    assert all(result["confusion_matrix"] == alone["confusion_matrix"] for result in together)


@contextmanager
def logits_of_evaluations() -> Iterator[list[torch.Tensor]]:
    count, seen = accuracy.count, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accuracy, "count", lambda *arguments: seen.append(arguments[1]) or count(*arguments))
        yield seen


@pytest.fixture(scope="module")
def revnet_s(tmp_path_factory) -> tuple[Path, tuple[str, ...], torch.Tensor]:
    """A folder with cifar.zip, initial.pt and a run of revnet/cifar10_resnet32 from it, its words and its logits.

    It takes four steps, over both steps of the rate. The rate is lower, so that other processors' rounding does not
    grow, and the decay so high that it shows.
    """
    folder = tmp_path_factory.mktemp("revnet")
    root = classification_trees.cifar_zip(folder / "cifar.zip")
    words = ("experiment=revnet/cifar10_resnet32", f"data.root={root}", "data.crops_per_minibatch=10")
    words += ("lr_schedule.steps=[2,3]", "trainer.steps=4", "optim.lr=0.001", "optim.weight_decay=0.2")
    torch.save(assemble.network_of(classification_config(*words), 10).state_dict(), folder / "initial.pt")
    start = (f"init.weights={folder / 'initial.pt'}", "init.format=standard_bn", "trainer.evaluate_images=null")
    with logits_of_evaluations() as logits:
        train(checked("train_imagenet", *words, *start, f"run_dir={folder / 'run'}"))
    return folder, words, torch.cat(logits)


def test_revnet_s_recipe_is_a_loop_of_plain_pytorch(revnet_s):
    """Beside a loop of its own from the paper.

    The network is ours, which tests/models/bodies/test_revnet.py compares with the paper's.
    """
    folder, words, _ = revnet_s
    config, initial = classification_config(*words), torch.load(folder / "initial.pt")
    network = assemble.network_of(config, 10)
    network.load_state_dict(initial)
    network.train().to(memory_format=torch.channels_last)  # in float32, which rounds gradients by 0.1 %
    groups = [
        {"params": [p for p in network.parameters() if (p.dim() > 1) == decays], "weight_decay": 0.2 * decays}
        for decays in (True, False)
    ]
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    images = cifar10(folder / "cifar.zip", "train")
    mean = torch.from_numpy(images.pixels).double().mean(0)
    crops = assemble.classified_crops(config, images.minus(mean.numpy()), 4, World())
    for rate, minibatch in zip((1e-3, 1e-3, 1e-4, 1e-5), crops, strict=True):
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        shown = minibatch["image"].contiguous(memory_format=torch.channels_last)
        F.cross_entropy(network(shown), minibatch["label"]).backward()
        optimizer.step()
    trained = checkpoint.load(last_of(folder / "run"))
    torch.testing.assert_close(trained["mean_image"], mean)
    for name, expected in network.state_dict().items():
        change = (expected - initial[name]).double()
        assert (trained["network"][name] - expected).double().norm() <= 0.01 * change.norm(), name  # here: to the bit


def test_an_evaluation_takes_the_mean_image_of_the_training_from_the_checkpoint(revnet_s, tmp_path):
    """It does not need the training images."""
    folder, _, trained = revnet_s
    root = classification_trees.cifar_zip(tmp_path / "cifar.zip", splits=("test",))
    options = ("workers=0", "device=cpu", f"data.root={root}", f"results={tmp_path / 'again.json'}")
    with logits_of_evaluations() as logits:
        again = evaluate(checked("eval", f"checkpoint={last_of(folder / 'run')}", *options))
    torch.testing.assert_close(torch.cat(logits), trained)
    assert again["images"] == 10

    with pytest.raises(ValueError, match="data.mean_image=true with data.mean=.0.485.*give data.mean=.0,0,0."):
        classification_config("data=cifar10", "data.mean_image=true")


def expected_logits(file: Path, folder: Path, *overrides: str) -> torch.Tensor:
    """The logits of all images by torchvision's transforms on Pillow images and a network built by hand."""
    options = dict(override.split("=") for override in overrides)
    crop = int(options.get("crop", 32))
    resize = int(options.get("resize", 36 * crop // 32))
    crops = TenCrop(crop) if options.get("view") == "ten_crop" else lambda image: [CenterCrop(crop)(image)]
    state = checkpoint.load(file)
    norm = partial(ABN, activation=options.get("activation", "leaky_relu"))
    network = resnext101(norm, 3, structure=(1, 1, 1, 1), groups=1, base_channels=(8, 8, 16), stem_channels=8).eval()
    network.load_state_dict(state["ema"])
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    logits = []
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        with Image.open(path) as image:
            views = crops(Resize(resize)(image.convert("RGB")))
        pixels = torch.stack([(pil_to_tensor(view) / 255 - mean) / std for view in views])
        logits.append(network(pixels).mean(dim=0))
    return torch.stack(logits).detach()


def test_photographs_are_evaluated_in_crops_and_with_another_activation(tmp_path):
    """The mean of ten crops' logits, a larger crop, and the activation swapped: each has results of its own."""
    root = classification_trees.imagenet(tmp_path / "data")
    data = ("data=imagenet", f"data.root={root}", "data.crop_size=32", "data.resize=36", "data.workers=0")
    short = ("trainer.steps=2", "trainer.evaluate_images=null", "data.crops_per_minibatch=2", "trainer.ema_decay=0.5")
    train_shapes(tmp_path / "run", *data, *short)
    file = last_of(tmp_path / "run")
    options = (f"checkpoint={file}", "workers=0", "device=cpu")
    for further in ((), ("view=ten_crop",), ("crop=48",), ("crop=48", "resize=64"), ("activation=relu",)):
        with logits_of_evaluations() as seen:
            results = evaluate(checked("eval", *options, *further))
        torch.testing.assert_close(torch.cat(seen), expected_logits(file, root / "val", *further), atol=0.02, rtol=0)
        assert results["images"] == len([path for path in (root / "val").rglob("*") if path.is_file()])
        assert results["view"] == ("ten_crop" if "view=ten_crop" in further else "center")
    names = {path.stem for path in (tmp_path / "run").glob("results*.json")}
    assert names == {"results", "results_ten_crop", "results_crop48", "results_crop48_resize64", "results_relu"}
    record = json.loads((tmp_path / "run" / "results_crop48.json").read_text())["config"]
    assert (record["data"]["crop_size"], record["data"]["resize"]) == (48, 54)  # 36 * 48 / 32
    swapped = json.loads((tmp_path / "run" / "results_relu.json").read_text())["config"]["norm"]
    assert (swapped["name"], swapped["activation"]) == ("std", "relu")
    state = checkpoint.load(file)  # as a converted file, whose classes are numbers
    checkpoint.save(file, {**state, "classes": ["0", "1", "2"], "unnamed_classes": True})
    numbers = [(split, *pair) for split in ("train", "val") for pair in zip(WNIDS, ("2", "1", "10"), strict=True)]
    for split, wnid, number in numbers:
        (root / split / wnid).rename(root / split / number)
    with pytest.raises(ValueError, match="two orders: 1, 10, 2 as text, 1, 2, 10 as numbers. Give data.c"):
        evaluate(checked("eval", *options))
    evaluate(checked("eval", *options, "data.class_order=numbers"))
    record = json.loads((tmp_path / "run" / "results_numbers.json").read_text())
    assert [*record["accuracy"]] == ["1", "2", "10"]
    with pytest.raises(ValueError, match="crop=48 resize=40: expected a crop of at most resize pixels"):
        evaluate(checked("eval", *options, "crop=48", "resize=40"))


@pytest.mark.parametrize("override", ["window.size=64", "tta.flip=true", "data.base_size=9", "predictions=DIR"])
def test_keys_of_a_segmentation_are_refused_for_a_classification(override):
    options = checked("eval", "checkpoint=x", override)
    with pytest.raises(ValueError, match=f"^{override.split('=')[0]}=.* is for segmentation, and it"):
        refuse_other_tasks(options, "classification", "it")
    refuse_other_tasks(options, "segmentation", "it")


def test_counts_of_predictions():
    """One of seven classes is right, or among the five highest, or among the lowest two."""
    cells = torch.zeros(7 * 7 + 2, dtype=torch.int64)
    logits = torch.arange(7.0).repeat(3, 1)  # class 6 is the highest, 0 and 1 are not among the five highest
    accuracy.count(cells, logits, torch.tensor([6, 2, 1]))
    accuracy.count(cells, logits[:1], torch.tensor([6]))
    confusion, (in_top5, unscored) = cells[:-2].view(7, 7), cells[-2:].tolist()
    assert confusion[6, 6] == 2 and confusion[2, 6] == 1 and confusion[1, 6] == 1
    assert confusion.sum() == 4 and (in_top5, unscored) == (3, 0)


def test_images_without_a_finite_score_are_counted_and_end_the_evaluation():
    """One class without a finite score is enough, even if it is not the right one."""
    body = torch.nn.Flatten()
    forward = Forward(body, torch.zeros(1), torch.ones(1), torch.contiguous_format, nullcontext, "give float32")
    dataset = SimpleNamespace(classes=["a", "b", "c"], name="points", split="val")

    def scores(*values: float) -> dict:
        minibatches = [{"image": torch.tensor(values).view(-1, 3, 1, 1), "label": torch.zeros(len(values) // 3).long()}]
        with progress_bar(make_console()) as progress:
            return evaluate_split(forward, dataset, minibatches, world=World(), progress=progress).scores

    assert scores(3, 2, 1, -math.inf, 0, 0) == {"top1": 0.5, "top5": 1}
    with pytest.raises(FloatingPointError, match="^2 of 3 images have no finite score; give float32$"):
        scores(3, 2, 1, 0, math.nan, 0, 0, 0, math.inf)


def test_a_swapped_activation_has_its_usual_parameter():
    def swapped(norm: str, to: str) -> tuple[str, float]:
        config = classification_config(*norm.split(), "trainer.steps=1")
        checked("eval", "checkpoint=x", f"activation={to}").apply_to(config)
        return config.norm.activation, config.norm.activation_param

    elu = "norm.activation=elu norm.activation_param=1.0"
    assert swapped(elu, "leaky_relu") == ("leaky_relu", 0.01) and swapped("norm=inplace", "elu") == ("elu", 1.0)
    assert swapped("norm.activation_param=0.2", "leaky_relu") == ("leaky_relu", 0.2)  # the same one
    with pytest.raises(ValueError, match="activation=rleu: expected one of"):
        checked("eval", "checkpoint=x", "activation=rleu")


def test_a_part_of_the_images_has_every_class():
    """Files lie by class: the first 40 photographs would be of one. Shapes come in turn: every 10th is of four."""
    config, val_set = classification_config("data.workers=0").data, shapes(None, "val")
    for images, expected in ((40, [5] * 8), (20, [3, 2] * 4), (None, [25] * 8), (201, [25] * 8)):
        loaded = assemble.evaluation_minibatches(config, val_set, World(), images, batch_size=30)
        assert torch.cat([minibatch["label"] for minibatch in loaded]).bincount().tolist() == expected
