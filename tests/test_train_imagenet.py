"""Classification on the engine of segmentation: what docs/training.md promises holds for it too."""

import itertools
import json
import os
import shutil
import signal
import subprocess
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image
from torch import nn
from torchvision.transforms import CenterCrop, Resize, TenCrop
from torchvision.transforms.functional import pil_to_tensor

import train_seg
from datasets import cifar10
from engine import build, checkpoint
from engine import config as configuration
from engine.classification.evaluation import Counts, class_logits
from engine.distributed import World
from engine.forward import Forward
from engine.metrics_logger import MetricsLogger
from engine.schema.classification import ClassificationRun
from engine.schema.evaluation import Evaluation
from engine.schema.keys import refuse_other_tasks
from engine.schema.segmentation import SegmentationRun
from engine.stopping import Preempted
from engine.training_step import train_step
from eval import evaluate
from models.bodies import resnext101
from models.layers import ABN
from models.layers.backends.compiled import compiler_available
from tests.datasets import classification_trees
from tests.faults.runs import steps_of
from tests.host_reads import host_reads
from tests.ranks import Ranks
from tests.runs import REPOSITORY, SHORT, SHORT_SHAPES, classification_config, command, composed, one_epoch
from tests.test_structure import windows
from train_imagenet import train

STEPS = 24
WIDER_CHANNELS = "body.channels=[[8,8],[8,8],[8,8],[8,8],[8,8,8],[8,8,8]]"
STEADY = ("trainer.log_every_steps=1", "trainer.checkpoint_every_steps=8", "trainer.evaluate_every_steps=12")
RUN = (*SHORT_SHAPES, *STEADY, f"trainer.steps={STEPS}", "trainer.ema_decay=0.5")
MEAN_IMAGE = ("data.mean_image=true", "data.mean=[0,0,0]")
OPTIMS = {
    "sgd, cosine": (),
    "sgd, step, three epochs": ("lr_schedule=step", "lr_schedule.every_epochs=1", "data.crops_per_minibatch=400"),
    "sgd, linear, mean image": ("lr_schedule=linear", "lr_schedule.warmup_steps=4", *MEAN_IMAGE),
    "adamw, multistep": (
        *("optim=adamw", "optim.head_lr_factor=10", "lr_schedule=multistep", "lr_schedule.epochs=null"),
        *("lr_schedule.steps=[6,15]", "lr_schedule.warmup_steps=3", "trainer.precision=bfloat16"),
    ),
}


def train_shapes(run_dir: Path, *overrides: str) -> dict:
    return train(composed("train_imagenet", *RUN, f"run_dir={run_dir}", *overrides))


@pytest.fixture(scope="module", params=OPTIMS)
def whole(request, tmp_path_factory) -> tuple[Path, tuple[str, ...]]:
    """The directory of an uninterrupted run in one process, and its overrides."""
    run_dir = tmp_path_factory.mktemp("shapes") / "run"
    train_shapes(run_dir, *OPTIMS[request.param])
    return run_dir, OPTIMS[request.param]


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request, tmp_path_factory):
    started = Ranks(request.param, tmp_path_factory.mktemp("ranks"))
    yield started
    started.stop()


def assert_equal_runs(one: Path, other: Path) -> None:
    states = [checkpoint.load(path / "checkpoints" / "last.pt") for path in (one, other)]
    assert [state["step"] for state in states] == [STEPS, STEPS]
    for part in ("network", "ema"):
        assert all(torch.equal(states[0][part][name], states[1][part][name]) for name in states[0][part])
    assert steps_of(one) == steps_of(other) == list(range(1, STEPS + 1))


def run(run_dir: Path, overrides: tuple[str, ...], stop_at: int | None = None) -> int:
    """Train from the command line, with SIGTERM once step `stop_at` is recorded, if given; return the exit status."""
    started = subprocess.Popen(
        command("train_imagenet", *RUN, *overrides, f"run_dir={run_dir}", "resume=auto"),
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
    )
    if stop_at is not None:
        while started.poll() is None and stop_at not in steps_of(run_dir):
            time.sleep(0.01)
        started.send_signal(signal.SIGTERM)
    return started.wait(120)


def test_stopped_by_sigterm_and_resumed_it_ends_with_the_same_bits(tmp_path, whole):
    whole_dir, overrides = whole
    stopped = tmp_path / "stopped"
    assert run(stopped, overrides, stop_at=11) == 75
    assert 11 <= checkpoint.load(stopped / "checkpoints" / "last.pt")["step"] < STEPS
    assert run(stopped, overrides) == 0
    assert_equal_runs(stopped, whole_dir)


def test_it_learns_and_leaves_a_run_directory(tmp_path):
    """By chance it would be right once in eight times."""
    wider = ("body.base_channels=[16,16,32]", "body.stem_channels=16", "data.crops_per_minibatch=64", "data.padding=0")
    longer = ("trainer.steps=300", "trainer.evaluate_images=200", "trainer.log_every_steps=100", "optim.lr=0.1")
    results = train_shapes(tmp_path, *wider, *longer)
    assert json.loads((tmp_path / "results.json").read_text()) == results
    assert 0.25 < results["top1"] < results["top5"] <= 1
    assert (results["dataset"], results["split"], results["images"]) == ("shapes", "val", 200)
    assert len(results["accuracy"]) == 8 and sum(map(sum, results["confusion_matrix"])) == 200
    right = sum(row[label] for label, row in enumerate(results["confusion_matrix"]))
    assert results["top1"] == right / 200
    assert (tmp_path / "results_confusion.png").is_file() and "val top-1" in (tmp_path / "log.txt").read_text()
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert {"top1", "top5", "layers"} <= next(record for record in records if record["kind"] == "val").keys()


def test_a_step_and_an_evaluation_wait_once_for_the_device(tmp_path):
    config = classification_config(*SHORT_SHAPES, "trainer.steps=4", "optim.max_gradient_norm=1")
    make = partial(build.classification_network, config, 8)
    learner = build.learner(config, make, one_epoch(4), World())
    minibatch = {"image": torch.zeros(6, 3, 32, 32, dtype=torch.uint8), "label": torch.arange(6)}
    with host_reads() as reads:
        train_step(learner, nn.CrossEntropyLoss(), minibatch, 6, World())
    assert len(reads) == 1, reads
    train_shapes(tmp_path, "trainer.steps=1")
    options = (f"checkpoint={tmp_path / 'checkpoints' / 'last.pt'}", "workers=0")
    own = []
    for batch_size in (1000, 50):  # one minibatch, and twenty
        with host_reads() as reads:
            evaluate(composed("eval", *options, f"batch_size={batch_size}"))
        own.append([read for read in reads if "classification/evaluation.py" in read])
    assert own[0] == own[1] and all("evaluate_split" in read for read in own[0]), own


def gradients(rank: int, order: list[int], parts: int = 1) -> dict[str, torch.Tensor]:
    """Two steps in float64 on this rank: weights and last gradients. Each rank takes its share of `order`."""
    torch.set_default_dtype(torch.float64)
    try:
        world = World(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else World()
        crops, options = len(order), ("norm.sync=true", f"trainer.accumulation_steps={parts}")
        config = classification_config(*SHORT_SHAPES, "trainer.steps=4", *options)
        learner = build.learner(config, partial(build.classification_network, config, 8), one_epoch(4), world)
        generator = torch.Generator().manual_seed(0)
        for _ in range(2):
            images = torch.randint(0, 256, (crops, 3, 64, 64), dtype=torch.uint8, generator=generator)
            labels = torch.randint(0, 8, (crops,), generator=generator)
            share = order[world.rank * crops // world.size : (world.rank + 1) * crops // world.size]
            minibatch = {"image": images[share], "label": labels[share]}
            train_step(learner, nn.CrossEntropyLoss(), minibatch, crops, world)
        found = {f"gradient of {name}": p.grad for name, p in learner.network.named_parameters()}
        return {**found, **learner.network.state_dict()}
    finally:
        torch.set_default_dtype(torch.float32)


def test_several_processes_step_as_one(ranks):
    """Three ranks have 2, 3 and 3 of the eight images."""
    order = list(range(8))
    alone = gradients(0, order)
    for result in ranks.run(gradients, order):
        assert not isinstance(result, Exception), result
        for name, tensor in alone.items():
            torch.testing.assert_close(result[name], tensor, rtol=1e-10, atol=1e-10)


def trained_by_a_rank(rank: int, run_dir: str, stop_at: int | None = None) -> str:
    """Train on one rank; rank 1 gets SIGTERM after step `stop_at`, if given. Return how training ended."""

    def step(logger: MetricsLogger, *arguments) -> None:
        original(logger, *arguments)
        if rank == 1 and logger.all_steps == stop_at:
            os.kill(os.getpid(), signal.SIGTERM)

    original = MetricsLogger.step
    try:
        MetricsLogger.step = step
        train_shapes(Path(run_dir), "resume=auto", "norm.sync=true")
        return "finished"
    except Preempted as preempted:
        return str(preempted)
    finally:
        MetricsLogger.step = original


def evaluated_by_a_rank(rank: int, *overrides: str) -> dict:
    return evaluate(composed("eval", *overrides))


def test_processes_stop_resume_and_evaluate_together(ranks, tmp_path):
    """Resumed, they end with the same bits. Each of the 1,000 images is evaluated once."""
    whole, stopped, count = tmp_path / "whole", tmp_path / "stopped", len(ranks.processes)
    assert ranks.run(trained_by_a_rank, str(whole)) == ["finished"] * count
    assert ranks.run(trained_by_a_rank, str(stopped), 5) == [f"stopped after step 6 of {STEPS}"] * count
    assert ranks.run(trained_by_a_rank, str(stopped)) == ["finished"] * count
    assert_equal_runs(stopped, whole)
    last = f"checkpoint={whole / 'checkpoints' / 'last.pt'}"
    alone = evaluate(composed("eval", last, "workers=0", f"results={tmp_path / 'alone.json'}"))
    together = ranks.run(evaluated_by_a_rank, last, "workers=0", f"results={tmp_path / 'together.json'}")
    assert alone["images"] == sum(map(sum, alone["confusion_matrix"])) == 1000
    assert all(result["confusion_matrix"] == alone["confusion_matrix"] for result in together)


@pytest.mark.parametrize(
    "overrides",
    [
        ("trainer.precision=bfloat16", "trainer.accumulation_steps=2"),
        ("trainer.precision=float16", "trainer.recompute=sqrt"),
        ("norm=std", "norm.activation=relu", "body=resnet_cifar_tiny", "body.base_channels=[8,8]"),
        ("body=revnet_tiny", "norm=inplace", "trainer.precision=bfloat16", "trainer.accumulation_steps=2", *MEAN_IMAGE),
        ("body=revnet_tiny", "body.reversible=false", "norm=std", "norm.activation=relu", "optim.decay=weights"),
        ("body=densenet264", "body.structure=[1,1,1,1]", "body.growth=4", "body.stem=cifar", "body.stem_channels=8"),
        (
            "body=wider_resnet38",
            "body.structure=[1,1,1,1,1,1]",
            WIDER_CHANNELS,
        ),
        pytest.param(("trainer.compile=true",), marks=pytest.mark.slow),
    ],
    ids=lambda overrides: overrides[0],
)
def test_switches_and_bodies_train(tmp_path, overrides):
    bodies = [name for name in overrides if name.startswith("body=")]
    short = [o for o in SHORT_SHAPES if not (bodies and o.startswith("body"))]
    if "trainer.compile=true" in overrides and not compiler_available("cpu"):
        pytest.skip("no compiler")
    options = (*short, "trainer.steps=2", f"run_dir={tmp_path}", *overrides)
    assert train(composed("train_imagenet", *options))["images"] == 24


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["std", "inplace"])
def test_a_reversible_body_trains_compiled_as_it_does_eagerly(tmp_path, norm):
    """Statistics move once per step, although the compiled branches run twice."""
    if not compiler_available("cpu"):
        pytest.skip("no compiler")
    short = [o for o in SHORT_SHAPES if not o.startswith("body")]
    options = (*short, "body=revnet_tiny", f"norm={norm}", "trainer.steps=3", "trainer.log_every_steps=1")
    losses = []
    for compiled in ("false", "true"):
        run_dir = tmp_path / compiled
        train(composed("train_imagenet", *options, f"run_dir={run_dir}", f"trainer.compile={compiled}"))
        lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
        losses.append([line["loss"] for line in lines if line["kind"] == "train"])
    network = checkpoint.load(run_dir / "checkpoints" / "last.pt")["network"]
    counts = [value for name, value in network.items() if name.endswith("num_batches_tracked")]
    assert counts and all(count == 3 for count in counts)
    assert len(losses[0]) == 3 and losses[1] == pytest.approx(losses[0], rel=1e-2)  # float32


@pytest.mark.parametrize("choice", ["data=shapes", "experiment=cifar10/resnet14", "experiment=cifar10/revnet38"])
def test_debug_smoke_takes_two_steps_of_anything(tmp_path, choice):
    cifar = (f"data.root={classification_trees.cifar_folders(tmp_path / 'cifar')}",) if "cifar" in choice else ()
    tiny = ("body=resnet_cifar_tiny",) if "resnet14" in choice else ()
    options = (choice, "debug=smoke", "norm.backend=eager", *cifar, *tiny)
    results = train(composed("train_imagenet", *options, f"run_dir={tmp_path / 'run'}", "trainer.device=cpu"))
    assert results["images"] == 2 and checkpoint.load(tmp_path / "run" / "checkpoints" / "last.pt")["step"] == 2


def test_a_checkpoint_says_its_task_and_commands_of_the_other_refuse_it(tmp_path):
    run_dir = tmp_path / "run"
    train_shapes(run_dir, "trainer.steps=1")
    last = run_dir / "checkpoints" / "last.pt"
    state = checkpoint.load(last)
    assert state["task"] == "classification" and not {"palette", "mean_image"} & state.keys()
    assert configuration.plain(configuration.of_checkpoint(state, ClassificationRun, "it")) == state["config"]
    refusal = "is for the task classification: expected segmentation"
    with pytest.raises(ValueError, match=refusal):
        configuration.of_checkpoint(state, SegmentationRun, "it")
    with pytest.raises(ValueError, match=f"run_dir={run_dir} {refusal}"):
        train_seg.train(composed("train_seg", *SHORT, "trainer.steps=2", f"run_dir={run_dir}", "resume=auto"))


def test_an_evaluation_takes_the_mean_image_of_the_training_from_the_checkpoint(tmp_path):
    """It does not need the training images."""
    root = classification_trees.cifar_folders(tmp_path / "cifar")
    data = ("data=cifar10", f"data.root={root}", "data.crops_per_minibatch=10", "trainer.evaluate_images=null")
    body = ("body=revnet_tiny", "body.structure=[1,1,1]", "body.channels=[[8,8],[8,8],[8,8]]", "body.stem_channels=8")
    steps = ("trainer.epochs=null", "trainer.steps=4", "trainer.evaluate_every_epochs=null", "trainer.device=cpu")
    trained = train(composed("train_imagenet", *data, *body, *steps, *MEAN_IMAGE, f"run_dir={tmp_path / 'run'}"))
    last = tmp_path / "run" / "checkpoints" / "last.pt"
    state = checkpoint.load(last)
    train_set, test_set = (cifar10(root, split) for split in ("train", "test"))
    assert np.array_equal(state["mean_image"].numpy(), train_set.pixels.mean(axis=0, dtype=np.float64))
    shutil.rmtree(root / "train")
    options = ("workers=0", "device=cpu", "results=" + str(tmp_path / "again.json"))
    again = evaluate(composed("eval", f"checkpoint={last}", *options))
    assert again["confusion_matrix"] == trained["confusion_matrix"] and again["images"] == 10

    config = configuration.of_checkpoint(state, ClassificationRun, "it")
    make, classes = partial(build.classification_network, config), state["classes"]
    network = checkpoint.load_network(lambda: make(len(classes)), state, classes, last).eval()
    inputs = (
        (torch.from_numpy(test_set.pixels) - state["mean_image"]) / 255 / torch.tensor(config.data.std).view(3, 1, 1)
    )
    labels = network(inputs.float()).argmax(dim=1)
    assert np.array(again["confusion_matrix"])[test_set.labels, labels].all()

    for other, message in (
        ({key: value for key, value in state.items() if key != "mean_image"}, "its mean_image is None: expected"),
        ({**state, "mean_image": state["mean_image"][:, :1, :1]}, r"\[3, 1, 1\]: expected .* \[3, 32, 32\]"),
    ):
        checkpoint.save(tmp_path / "other.pt", other)
        with pytest.raises(ValueError, match=f"data.mean_image=true, and .*{message}"):
            evaluate(composed("eval", f"checkpoint={tmp_path / 'other.pt'}", *options))


def test_a_mean_image_takes_the_place_of_the_mean_colour():
    with pytest.raises(ValueError, match="data.mean_image=true with data.mean=.0.485.*give data.mean=.0,0,0."):
        classification_config("data=cifar10", "data.mean_image=true")


def test_a_segmentation_starts_from_the_body_of_a_classification(tmp_path):
    train_shapes(tmp_path / "classified", "trainer.steps=1", "trainer.ema_decay=null")
    given = tmp_path / "classified" / "checkpoints" / "last.pt"
    start = (*SHORT, f"init.weights={given}", "body.base_channels=[8,8,16]", "body.stem_channels=8", "trainer.steps=1")
    train_seg.train(composed("train_seg", *start, "optim.lr=1e-12", f"run_dir={tmp_path / 'segmented'}"))
    before, after = (
        checkpoint.load(path)["network"] for path in (given, tmp_path / "segmented" / "checkpoints" / "last.pt")
    )
    weights = [name for name in before if name.endswith((".weight", ".bias")) and not name.startswith("classifier.")]
    assert all(torch.allclose(before[name], after[f"body.{name}"], atol=1e-6) for name in weights)
    assert "classifier.fc.weight" in (tmp_path / "segmented" / "log.txt").read_text()


def test_a_classifier_starts_from_one_of_other_classes(tmp_path):
    """Its own classifier starts from random weights."""
    train_shapes(tmp_path / "first", "trainer.steps=1", "trainer.ema_decay=null")
    given = tmp_path / "first" / "checkpoints" / "last.pt"
    state = checkpoint.load(given)
    network = {**state["network"], "classifier.fc.weight": torch.ones(5, 128), "classifier.fc.bias": torch.ones(5)}
    checkpoint.save(tmp_path / "other.pt", {**state, "network": network, "classes": list("abcde")})
    train_shapes(tmp_path / "second", "trainer.steps=1", f"init.weights={tmp_path / 'other.pt'}", "optim.lr=1e-12")
    after = checkpoint.load(tmp_path / "second" / "checkpoints" / "last.pt")["network"]
    assert torch.allclose(after["mod1.conv1.weight"], network["mod1.conv1.weight"], atol=1e-6)
    assert after["classifier.fc.weight"].shape == (8, 128) and not (after["classifier.fc.weight"] == 1).any()


def expected_logits(file: Path, folder: Path, *overrides: str) -> torch.Tensor:
    """The logits of all images by torchvision's transforms on Pillow images and a network built by hand."""
    given = dict(override.split("=") for override in overrides)
    crop = int(given.get("crop", 32))
    resize = int(given.get("resize", 36 * crop // 32))
    crops = TenCrop(crop) if given.get("view") == "ten_crop" else lambda image: [CenterCrop(crop)(image)]
    state = checkpoint.load(file)
    norm = partial(ABN, activation=given.get("activation", "leaky_relu"))
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


def test_photographs_are_evaluated_in_crops_and_with_another_activation(tmp_path, monkeypatch):
    """The mean of ten crops' logits, a larger crop, and the activation swapped: each has results of its own."""
    root = classification_trees.imagenet(tmp_path / "data")
    data = ("data=imagenet", f"data.root={root}", "data.crop_size=32", "data.resize=36", "data.workers=0")
    short = ("trainer.steps=2", "trainer.evaluate_images=null", "data.crops_per_minibatch=2")
    train_shapes(tmp_path / "run", *data, *short)
    last = tmp_path / "run" / "checkpoints" / "last.pt"
    options = (f"checkpoint={last}", "workers=0", "device=cpu")
    for more in ((), ("view=ten_crop",), ("crop=48",), ("crop=48", "resize=64"), ("activation=relu",)):
        with monkeypatch.context() as patch:
            seen: list[torch.Tensor] = []
            patch.setattr(Counts, "add", lambda counts, logits, labels, seen=seen: seen.append(logits))
            evaluate(composed("eval", *options, *more))
        torch.testing.assert_close(torch.cat(seen), expected_logits(last, root / "val", *more), atol=0.02, rtol=0)
        results = evaluate(composed("eval", *options, *more))
        assert results["images"] == len([path for path in (root / "val").rglob("*") if path.is_file()])
        assert results["view"] == ("ten_crop" if "view=ten_crop" in more else "center")
    names = {path.stem for path in (tmp_path / "run").glob("results*.json")}
    assert names == {"results", "results_ten_crop", "results_crop48", "results_crop48_resize64", "results_relu"}
    written = json.loads((tmp_path / "run" / "results_crop48.json").read_text())["config"]
    assert (written["data"]["crop_size"], written["data"]["resize"]) == (48, 54)  # 36 * 48 / 32
    swapped = json.loads((tmp_path / "run" / "results_relu.json").read_text())["config"]["norm"]
    assert (swapped["name"], swapped["activation"]) == ("std", "relu")
    with pytest.raises(ValueError, match="crop=48 resize=40: expected a crop of at most resize pixels"):
        evaluate(composed("eval", *options, "crop=48", "resize=40"))


@pytest.mark.parametrize("override", ["window.size=64", "tta.flip=true", "data.base_size=9", "predictions=DIR"])
def test_keys_of_a_segmentation_are_refused_for_a_classification(override):
    options = configuration.typed(composed("eval", "checkpoint=x", override), Evaluation)
    with pytest.raises(ValueError, match=f"^{override.split('=')[0]}=.* is for segmentation, and it"):
        refuse_other_tasks(options, "classification", "it")
    refuse_other_tasks(options, "segmentation", "it")


def test_the_logits_of_crops_are_averaged():
    class Sums(nn.Module):
        def forward(self, images):
            return images.flatten(1).sum(dim=1, keepdim=True) * torch.tensor([[1.0, 2.0]])

    forward = Forward(Sums(), torch.zeros(1, 3, 1, 1), torch.ones(1, 3, 1, 1), torch.contiguous_format, nullcontext)
    images = torch.randint(0, 256, (4, 10, 3, 2, 2), dtype=torch.uint8)
    expected = images.flatten(2).double().sum(dim=2).mean(dim=1, keepdim=True) * torch.tensor([[1.0, 2.0]])
    torch.testing.assert_close(class_logits(forward, images).double(), expected)
    assert torch.equal(class_logits(forward, images[:, 0]), forward(images[:, 0]))


def test_counts_of_predictions():
    """Of seven classes: right, among the five highest, and among the lowest two."""
    counts = Counts(7, torch.device("cpu"))
    logits = torch.arange(7.0).repeat(3, 1)  # class 6 is the highest, 0 and 1 are not among the five highest
    counts.add(logits, torch.tensor([6, 2, 1]))
    counts.add(logits[:1], torch.tensor([6]))
    assert counts.confusion[6, 6] == 2 and counts.confusion[2, 6] == 1 and counts.confusion[1, 6] == 1
    assert counts.confusion.sum() == 4
    assert counts.of_classes.tolist() == [[0, 1, 1, 0, 0, 0, 2], [0, 0, 0, 0, 0, 0, 2], [0, 0, 1, 0, 0, 0, 2]]
    assert Counts(101, torch.device("cpu")).confusion is None  # too large to be read


def test_a_swapped_activation_has_its_usual_parameter():
    def swapped(norm: str, to: str) -> tuple[str, float]:
        config = classification_config(*norm.split(), "trainer.steps=1")
        configuration.typed(composed("eval", "checkpoint=x", f"activation={to}"), Evaluation).apply_to(config)
        return config.norm.activation, config.norm.activation_param

    elu = "norm.activation=elu norm.activation_param=1.0"
    assert swapped(elu, "leaky_relu") == ("leaky_relu", 0.01) and swapped("norm=inplace", "elu") == ("elu", 1.0)
    assert swapped("norm.activation_param=0.2", "leaky_relu") == ("leaky_relu", 0.2)  # the same one
    with pytest.raises(ValueError, match="activation=rleu: expected one of"):
        configuration.typed(composed("eval", "checkpoint=x", "activation=rleu"), Evaluation)


def test_a_part_of_the_images_has_every_class(tmp_path):
    """Files lie by class: the first 40 photographs would be of one. Shapes come in turn, and every 25th is taken."""
    results = train_shapes(tmp_path, "trainer.steps=1", "trainer.evaluate_images=40")
    assert [sum(row) for row in results["confusion_matrix"]] == [5] * 8


def test_the_entries_share_no_code():
    """Code that two entries would share belongs to the engine."""
    files = [REPOSITORY / f"{name}.py" for name in ("train_seg", "train_imagenet", "eval")]
    for one, other in itertools.combinations(files, 2):
        assert not windows(one.read_text()) & windows(other.read_text())
    limits = {"train_seg.py": 90, "train_imagenet.py": 60}
    assert all(len(file.read_text().splitlines()) <= limits.get(file.name, 250) for file in files)
