"""What the choices of a plugin get if they ask for it, in trainings as users start them."""

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.data import Dataset

from datasets.class_table import ClassTable
from datasets.row import Row
from datasets.samplers import ShuffledMinibatches
from datasets.segmentation import Files, Sample, SegmentationDataset
from datasets.verify import verify
from engine import assemble
from engine.assemble import network_of
from engine.assemble.contracts import batch_problem, check_choices, parts_named
from engine.assemble.optimization import lr_schedule
from engine.checkpoint import files as checkpoint
from engine.prediction import open_network
from engine.process.distributed import World
from engine.process.stopping import Preempted
from engine.schema import evaluation
from engine.schema.additions import Augmentation, Logger, Score
from engine.schema.data import Sampler, SegmentationData
from engine.schema.network import Body, Head
from engine.schema.optim import LRSchedule
from engine.schema.segmentation import Loss
from engine.segmentation import inference
from engine.segmentation.cross_entropy import Batch, CrossEntropy, SummedLoss
from engine.training import build, capture, loop
from engine.training.planner import step_memory
from eval import evaluate
from keepless import upsampled_cross_entropy
from models.segmentation import Output, Outputs
from scripts.export import export
from scripts.predict import predict
from tests.choices import registered
from tests.engine.learners import forward_of
from tests.runs import SHORT, checked, one_epoch, run_config, same
from train_seg import train


@pytest.fixture(autouse=True)
def choices_of_this_file() -> Iterator[None]:
    with registered(OWN):
        yield


def train_short(run_dir: Path, *words: str) -> dict:
    return train(checked("train_seg", f"run_dir={run_dir}", *SHORT, "trainer.pictures=0", *words))


def weights_of(run_dir: Path) -> dict[str, torch.Tensor]:
    return checkpoint.load(run_dir / "checkpoints" / "last.pt")["network"]


class Watching(CrossEntropy):
    seen: ClassVar[list[Batch]] = []

    def __init__(self, ignore_index, weights, stride):
        super().__init__(ignore_index, weights, stride=stride)

    def forward(self, logits, labels, batch):
        assert len(batch.images) == len(batch.names) == len(labels) and batch.images.shape[2:] == labels.shape[1:]
        self.seen.append(batch)
        return super().forward(logits, labels)


def made_by_a_function(ignore_index, weights, stride):
    return Watching(ignore_index, weights, stride)


def test_a_loss_is_given_each_micro_batch_and_changes_nothing_else(tmp_path):
    words = ("trainer.steps=2", "trainer.accumulation_steps=2", "data.crops_per_minibatch=4")
    words += ("head.auxiliary_weight=0.4",)
    Watching.seen.clear()
    results = train_short(tmp_path / "own", "loss=watching", *words)
    usual = train_short(tmp_path / "usual", "loss=cross_entropy", *words)
    assert results["miou"] == usual["miou"] and same(weights_of(tmp_path / "own"), weights_of(tmp_path / "usual"))
    assert [batch.step for batch in Watching.seen] == [1] * 4 + [2] * 4  # two micro-batches, two outputs
    assert [batch.epoch for batch in Watching.seen[::4]] == [step / 15 for step in (1, 2)]
    names = [batch.names for batch in Watching.seen]
    assert names[0] == names[1] and len({*names[0], *names[2]}) == 4  # the outputs see the same, the micro-batches not
    assert Watching.seen[0].images.dtype == torch.uint8 and Watching.seen[0].images.shape == (2, 3, 64, 64)


def test_a_loss_that_asks_for_batches_is_not_captured():
    words = (*SHORT, "loss=watching", "trainer.device=cuda")
    why = "loss=watching asks for each batch, and a CUDA graph would give it the first again"
    config = run_config(*words)
    assert batch_problem(config) == why and batch_problem(run_config(*SHORT)) is None
    assert build.why_eager(config, nn.Identity(), 10_000, World(device=torch.device("cuda"))) == why
    check_choices(config)
    config.trainer.capture = True
    with pytest.raises(ValueError, match=f"^trainer.capture=true: {why}; "):
        check_choices(config)


def test_one_that_a_function_makes_is_found_before_it_would_be_captured(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "why_eager", lambda *_: None)
    monkeypatch.setattr(capture.torch.cuda, "Stream", lambda: None)
    monkeypatch.setattr(capture.torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_rng_state", torch.get_rng_state)
    Watching.seen.clear()
    train_short(tmp_path / "run", "loss=made", "trainer.steps=5")
    assert [batch.step for batch in Watching.seen] == [1, 2, 3, 4, 5]
    assert "capture off: the loss asks for each batch" in (tmp_path / "run" / "log.txt").read_text()


class Trained(CrossEntropy):
    def __init__(self, ignore_index, weights, stride):
        super().__init__(ignore_index, weights, stride=stride)
        self.parameter = nn.Parameter(torch.zeros(()))

        self.calls = 0

    def forward(self, logits, labels):
        self.calls += 1
        loss = super().forward(logits, labels)
        return loss + self.parameter if self.calls > 2 else loss


def test_a_loss_that_would_be_trained_is_refused(tmp_path):
    """The loss uses its parameter from the third step on."""
    says = "gets a gradient, but only the network is trained"
    with pytest.raises(ValueError, match=rf"^loss=trained: losses\.\d+\.parameter {says}"):
        train_short(tmp_path / "run", "loss=trained", "trainer.steps=3")


def test_the_memory_of_a_loss_that_asks_for_batches_is_planned():
    peaks = [step_memory(run_config(*SHORT, f"loss={loss}"), 2, 64).peak for loss in ("watching", "cross_entropy")]
    assert peaks[0] == peaks[1]


class Even(nn.Module):
    """A head whose classes with odd ids never win."""

    def __init__(self, in_channels, norm_act, classes):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(in_channels, classes, 1), norm_act(classes))
        self.register_buffer("odd", torch.arange(classes).remainder(2).bool()[:, None, None], persistent=False)
        self.out_channels = classes

    def forward(self, features):
        return self.layers(features)

    def decide(self, scores):
        return scores.masked_fill(self.odd, -torch.inf).argmax(dim=1)


@pytest.fixture
def even(tmp_path) -> Path:
    train_short(tmp_path / "run", "head=even", "trainer.steps=2")
    return tmp_path / "run"


IMAGE = np.random.default_rng(0).integers(0, 256, (64, 96, 3), np.uint8)


@pytest.mark.slow
def test_what_a_head_decides_is_exported(even, tmp_path):
    export(checked("export", f"checkpoint={even}", f"output={tmp_path / 'n.pt2'}", "argmax=true"))
    program = torch.export.load(tmp_path / "n.pt2").module()
    ids = program(torch.from_numpy(IMAGE).permute(2, 0, 1)[None].float())[0].numpy()
    assert np.array_equal(ids, open_network(even).predict(IMAGE))


def test_what_a_head_decides_is_evaluated_and_predicted(even, tmp_path):
    network, image = open_network(even), IMAGE
    assert network.network.head.out_channels == 19
    with torch.inference_mode():
        logits = network(torch.from_numpy(image).permute(2, 0, 1)[None])
        expected = network.network.head.decide(logits)[0].numpy()
    assert (expected != logits.argmax(dim=1)[0].numpy()).any() and not (expected % 2).any()
    assert np.array_equal(network.predict(image), expected)
    assert np.array_equal(network.classes_by(network.probabilities(image)), expected)
    tta = evaluation.TestTimeAugmentation(scales=[1.0, 0.7], flip=True)
    with_views = open_network(even, evaluation.Prediction(device="cpu", tta=tta))
    assert not (with_views.predict(image) % 2).any()

    options = (f"checkpoint={even}", "device=cpu")
    results = evaluate(checked("eval", *options, "workers=0", f"results={tmp_path / 'r.json'}"))
    predicted = np.array(results["confusion_matrix"]).sum(axis=0)
    assert predicted.sum() and not predicted[1::2].any()

    Image.fromarray(image).save(tmp_path / "a.png")
    for words in ((), ("probabilities=true",)):
        out = tmp_path / f"out{len(words)}"
        (file,) = predict(checked("predict", *options, f"input={tmp_path / 'a.png'}", f"output={out}", *words))
        assert np.array_equal(np.array(Image.open(file)), network.label_ids[expected])


def test_a_head_that_fails_in_other_commands_is_named(even, tmp_path, monkeypatch):
    Image.new("RGB", (96, 64)).save(tmp_path / "a.png")
    monkeypatch.setattr(Even, "forward", lambda *_: {}["features"])
    commands = {evaluate: ("eval", "workers=0"), export: ("export", f"output={tmp_path / 'n.pt2'}")}
    commands[predict] = ("predict", f"input={tmp_path / 'a.png'}", f"output={tmp_path / 'out'}")
    for run, (name, *words) in commands.items():
        with pytest.raises(ValueError, match="^head=even: .*KeyError: 'features'"):
            run(checked(name, f"checkpoint={even}", *words))


@pytest.mark.parametrize(
    "result, problem",
    [
        (lambda scores: scores[:, 0], r"Even.decide returned torch.float32 \(1, 64, 96\): expected whole numbers"),
        (lambda scores: scores.argmax(dim=1)[0], r"Even.decide returned torch.int64 \(64, 96\): expected whole"),
        (lambda scores: scores.argmax(dim=1) + 255, "Even.decide returned ids other than 0 to 18"),
        (lambda scores: None, "Even.decide returned NoneType: expected whole numbers"),
    ],
)
def test_what_a_head_decides_is_a_class_of_each_pixel(result, problem, monkeypatch):
    network = network_of(run_config(*SHORT, "head=even"), 19).eval()
    monkeypatch.setattr(Even, "decide", lambda _, scores: result(scores))
    with pytest.raises(ValueError, match=problem):
        inference.predict(forward_of(network), torch.zeros(1, 3, 64, 96, dtype=torch.uint8))


def test_a_head_whose_decide_fails_is_named(monkeypatch):
    config = run_config(*SHORT, "head=even")
    network = network_of(config, 19)
    monkeypatch.setattr(Even, "decide", lambda *_: {}["scores"])
    with pytest.raises(ValueError, match="^head=even: KeyError: 'scores'$"), parts_named(config):
        build._check_classes_of_head(network, torch.device("cpu"))


class Table:
    """A logger that keeps what TensorBoard gets; it draws random numbers and spoils whatever it is given."""

    calls: ClassVar[list[tuple]] = []

    def __init__(self, folder, config):
        torch.rand(3)
        config["optim"]["lr"] = 7.0
        self.calls.clear()

    def scalars(self, step, values):
        torch.rand(1)
        self.calls.append((step, dict(values)))
        values.clear()

    def picture(self, step, name, image):
        self.calls.append((step, name, image.copy()))
        image[:] = 0

    def end(self, status):
        self.calls.append((status,))


def test_a_logger_gets_scalars_and_pictures_and_changes_nothing(tmp_path):
    words = ("trainer.steps=4", "trainer.log_every_steps=2", "trainer.evaluate_every_steps=2", "trainer.pictures=1")
    usual = train(checked("train_seg", f"run_dir={tmp_path / 'usual'}", *SHORT, *words))
    results = train(checked("train_seg", f"run_dir={tmp_path / 'own'}", *SHORT, *words, "logger=table"))
    assert results["miou"] == usual["miou"] and same(weights_of(tmp_path / "own"), weights_of(tmp_path / "usual"))
    assert results["config"]["optim"] == usual["config"]["optim"] and usual["config"]["logger"] == {}
    *calls, (status,) = Table.calls
    steps = [call[0] for call in calls]
    events = EventAccumulator(str(tmp_path / "own" / "tensorboard")).Reload()
    assert status == "finished" and steps == [2, 2, 2, 4, 4, 4]
    scalars = {(step, name): value for step, values, *image in calls if not image for name, value in values.items()}
    shown = {(event.step, tag): event.value for tag in events.Tags()["scalars"] for event in events.Scalars(tag)}
    assert scalars == pytest.approx(shown) and {"train/loss", "val/miou"} <= {name for _, name in scalars}
    pictures = [(name, image) for _, name, *image in calls if image]
    assert [name for name, _ in pictures] == events.Tags()["images"] * 2
    assert all(image.any() and image.dtype == np.uint8 and image.shape[2] == 3 for _, (image,) in pictures)


class Named(ShuffledMinibatches):
    """Draws the images whose names come first in the alphabet."""

    def __init__(self, images, names, **order):
        super().__init__(images, **order)
        assert len(names) == images
        self.first = sorted(range(images), key=names.__getitem__)[: self.crops_per_minibatch]
        self.expected = [names[number] for number in self.first]

    def keys(self, epoch):
        return [(epoch, number) for number in self.first]


def test_a_sampler_knows_the_names_of_the_images():
    config = run_config(*SHORT, "sampler=named")
    train_set, _ = assemble.labelled_splits(config.data)
    [minibatch] = assemble.training_loader(config, train_set, 1, World())
    assert minibatch["name"] == sorted(entry.name for entry in train_set.files)[:2]


@pytest.mark.parametrize(
    "minibatches, says",
    [
        ([[3, 4]], r"gives \[3, 4\]: expected a list of \(epoch, number\) or datasets\.Draw"),
        ([[(0, 0), (0, 1)], [(0, 2), (0, 99)]], r"draws image 99: expected 0 to \d+"),
        ([[(0, 0), (0, 1)]] * 4, "ended after 4 of 10 minibatches"),
    ],
)
def test_a_sampler_of_other_images_or_too_few_is_refused(minibatches, says, monkeypatch):
    monkeypatch.setattr(Named, "__iter__", lambda _: iter(minibatches))
    config = run_config(*SHORT, "sampler=named", "data.workers=0")
    train_set, _ = assemble.labelled_splits(config.data)
    with pytest.raises(ValueError, match=rf"^sampler=named {says}$"):
        list(assemble.training_loader(config, train_set, 10, World()))


def without_counts(classes, ignore_index):
    return SimpleNamespace(add=print, scores=dict)


class PerCell(nn.Module):
    def __init__(self, ignore_index, weights, stride):
        super().__init__()

    def forward(self, logits, labels):
        return logits.mean(dim=1)


def for_two():
    return lambda image, label: (image, label)


def test_a_loss_that_is_no_scalar_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"^loss=per_cell: PerCell returned \(2, \d+, \d+\): expected a scalar"):
        train_short(tmp_path / "run", "loss=per_cell")


@pytest.mark.parametrize(
    "words, says",
    [
        (["head=even"], r"head=even: the head's Even\.decide returned torch\.float32 \(1, 64, 64\): expected"),
        (["scores=[countless]"], "scores=countless has no counts: expected an array or tensor of what add"),
        (["augmentations=[alone]"], r"augmentations=alone does not take \(crop, label, generator\)"),
    ],
)
def test_parts_that_fail_only_later_are_refused_before_the_first_step(words, says, tmp_path, monkeypatch):
    monkeypatch.setattr(Even, "decide", lambda _, scores: scores[:, 0])
    monkeypatch.setattr(loop, "train_step", lambda *_: pytest.fail("a step was taken"))
    with pytest.raises(ValueError, match=f"^{says}"):
        train_short(tmp_path / "run", *words)


class Failing(PerCell):
    def forward(self, logits, labels):
        return {}["alpha"] if logits is None else nn.Linear(2, 3)(logits)

    def fail_by(self, error):
        raise error


@pytest.mark.parametrize(
    "error, kind, says",
    [
        (MemoryError("no room for the bank"), MemoryError, "^loss=failing: MemoryError: no room for the bank$"),
        (ConnectionResetError("teacher"), ConnectionResetError, "^loss=failing: ConnectionResetError: teacher$"),
        (SystemExit("give up"), ValueError, "^loss=failing: SystemExit: give up$"),
        (
            RuntimeError("odd\nof two"),
            ValueError,
            r"^loss=failing: RuntimeError: odd\nof two\nThis comes from loss=failing$",
        ),
    ],
)
def test_any_error_of_a_part_names_its_choice_in_the_last_line(error, kind, says):
    with pytest.raises(kind, match=says), parts_named(run_config(*SHORT, "loss=failing")):
        Failing(255, None, None).fail_by(error)


@pytest.mark.parametrize("value", [lambda logits: logits.detach().mean(), lambda logits: logits.argmax(1).sum() * 1.0])
def test_a_loss_without_a_gradient_is_refused(value, monkeypatch):
    monkeypatch.setattr(Failing, "forward", lambda self, logits, labels: value(logits))
    logits = torch.zeros(1, 2, 4, 4, requires_grad=True)
    loss = SummedLoss(lambda stride: Failing(255, None, stride))
    with pytest.raises(ValueError, match="^loss=failing: Failing returned a tensor without a gradient: compute it"):
        with parts_named(run_config(*SHORT, "loss=failing")):
            loss(Outputs(Output(logits, None)), torch.zeros(1, 4, 4))
    with torch.no_grad():
        loss(Outputs(Output(logits, None)), torch.zeros(1, 4, 4))


def short_cycle(optimizer, steps, steps_per_epoch, warmup):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=steps // 2)


def plateau(optimizer, steps, steps_per_epoch, warmup):
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)


@pytest.mark.parametrize(
    "name, says",
    [
        ("short_cycle", "Tried to step 4 times"),
        ("plateau", "ReduceLROnPlateau.step: .*'metrics', which trainings do not give; choose a schedule of steps"),
    ],
)
def test_a_schedule_of_pytorch_that_fails_is_named(name, says):
    config = run_config(*SHORT, f"lr_schedule={name}")
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(ValueError, match=rf"^lr_schedule={name}: {says}"), parts_named(config):
        scheduler = lr_schedule(config.lr_schedule, optimizer, one_epoch(6))
        for _ in range(6):
            optimizer.step()
            scheduler.step()


@pytest.mark.parametrize(
    "has_weight, says",
    [(False, "has no loss_weight: give it one"), (True, "has reads=-1: expected a tuple of strides")],
)
def test_an_auxiliary_module_that_cannot_be_trained_is_named_by_its_head(has_weight, says, monkeypatch):
    auxiliary = nn.Conv2d(8, 19, 1)
    auxiliary.reads = -1
    if has_weight:
        auxiliary.loss_weight = 0.4
    monkeypatch.setattr(Even, "auxiliary", auxiliary, raising=False)
    config = run_config(*SHORT, "head=even")
    with pytest.raises(ValueError, match=rf"^head=even: Even\.auxiliary \(Conv2d\) {says}"), parts_named(config):
        _ = network_of(config, 19).strides


OfAnotherFile = type("OfAnotherFile", (PerCell,), {"__module__": "another_file"})


@pytest.mark.parametrize(
    "fail",
    [
        lambda: torch.zeros(1).backward(),
        lambda: F.conv2d(torch.zeros(1, 3, 4, 4), torch.zeros(1, 2, 1, 1)),
        lambda: upsampled_cross_entropy(torch.zeros(1, 2, 4, 4), torch.zeros(1, 8, 9, dtype=torch.long), stride=8),
    ],
)
def test_an_error_of_a_computation_ends_with_the_choices_that_may_have_caused_it(fail):
    with pytest.raises(Exception) as raised, parts_named(run_config(*SHORT, "loss=of_another_file")):
        fail()
    assert str(raised.value).endswith("\nThe cause may be in loss=of_another_file")


def failing_by_a_function(ignore_index, weights, stride):
    raise IndexError("no such class")


def test_an_error_names_the_choice_whose_code_raised_it_or_that_it_is_about():
    config, loss = run_config(*SHORT, "loss=failing"), Failing(255, None, None)
    cases = [
        (lambda: loss(None, None), "^loss=failing: KeyError: 'alpha'$"),
        (lambda: loss(torch.zeros(1, 5), None), "^loss=failing: RuntimeError: mat1 and mat2"),  # in PyTorch's frame
        (
            lambda: exec("raise ValueError('Failing returned (2,): expected a scalar')"),
            "^loss=failing: Failing returned",
        ),
    ]
    for raises, says in cases:
        with pytest.raises(ValueError, match=says), parts_named(config):
            raises()
    out_of_memory = MemoryError("out of memory")
    out_of_memory.__cause__ = RuntimeError("an allocation failed")
    errors = [(out_of_memory, config), (Preempted("stopped"), run_config(*SHORT, "loss=of_another_file"))]
    errors.append((KeyError("of ours"), run_config(*SHORT)))
    for error, parts in [*errors, (ValueError("loss=failing: said"), config)]:
        with pytest.raises(type(error)) as raised, parts_named(parts):
            raise error
        assert raised.value is error
    with (
        pytest.raises(ValueError, match="^loss=by_function: IndexError: no such class"),
        parts_named(run_config(*SHORT, "loss=by_function")),
    ):
        failing_by_a_function(255, None, None)


class InMemory(SegmentationDataset):
    def __init__(self, split):
        table = ClassTable(("a", "b"), palette=((0, 0, 0), (255, 0, 0)), official_ids=(0, 7), label_ids={0: 0, 7: 1})
        super().__init__("memory", split, [Files(f"{n}", f"{n}", f"{n}") for n in range(4)], table)

    def __getitem__(self, number):
        return Sample(np.full((64, 64, 3), number, np.uint8), np.eye(64, dtype=np.uint8), f"{number}")


def test_a_dataset_may_have_no_files(tmp_path):
    """Such as one of Parquet or a database: it makes its samples itself."""
    results = train_short(tmp_path / "run", "data=memory", "trainer.steps=1", "loss.class_weights=frequency")
    assert results["images"] == 2 and {*results["iou"]} == {"a", "b"}
    config = run_config(*SHORT, "data=memory", "data.train_split=[train,val]")
    with pytest.raises(ValueError, match="memory makes its samples itself: give one split"):
        assemble.labelled_splits(config.data)


IMAGE_OF_16, LABEL = np.zeros((16, 16, 3), np.uint8), np.eye(16, dtype=np.uint8)


@pytest.mark.parametrize(
    "image, label, says",
    [
        (IMAGE_OF_16 / np.float32(255), LABEL, r"an image of float32 \(16, 16, 3\): expected uint8 \(16, 16, 3\)$"),
        (IMAGE_OF_16[..., :1], LABEL, r"an image of uint8 \(16, 16, 1\): expected uint8 \(16, 16, 3\)$"),
        (IMAGE_OF_16, LABEL.astype(np.int64), r"a label of int64 \(16, 16\): expected uint8 \(16, 16\)$"),
        (IMAGE_OF_16, LABEL[1:], r"a label of uint8 \(15, 16\): expected uint8 \(16, 16\)$"),
        (IMAGE_OF_16, LABEL + 1, "a label with the ids 2: expected classes from 0 to 1, and 255 for"),
    ],
)
def test_samples_of_another_form_are_refused_before_the_first_step_and_in_workers(image, label, says, monkeypatch):
    monkeypatch.setattr(InMemory, "__getitem__", lambda _, number: Sample(image, label, f"{number}"))
    config = run_config(*SHORT, "data=memory", "data.workers=1")
    train_set, _ = assemble.labelled_splits(config.data)
    loader = assemble.training_loader(config, train_set, 1, World())
    for read in (lambda: verify(train_set, 0), lambda: list(loader)):
        with pytest.raises(ValueError, match="^data=memory: ") as error, parts_named(config):
            read()
        assert re.search(f"InMemory made [0-3] with {says}", str(error.value), re.MULTILINE)


def test_an_error_of_a_part_s_code_in_a_worker_is_named(monkeypatch):
    monkeypatch.setattr(InMemory, "__getitem__", lambda _, number: {}["image"])
    config = run_config(*SHORT, "data=memory", "data.workers=1")
    train_set, _ = assemble.labelled_splits(config.data)
    with pytest.raises(ValueError, match="^data=memory: KeyError: "), parts_named(config):
        list(assemble.training_loader(config, train_set, 1, World()))


class PlainImages(Dataset):
    def __init__(self, root, split):
        pass


def library_network(norm_act, classes, output_stride):
    return nn.Sequential(nn.Conv2d(3, 8, 3))


@pytest.mark.parametrize(
    "word, says",
    [
        ("data=plain_images", r"PlainImages, which makes a PlainImages: expected a SegmentationDataset or Classif"),
        ("body=library_network", r"library_network, which makes a Sequential: expected a models\.bodies\.body\.Body"),
    ],
)
def test_a_part_of_another_class_than_its_contract_says_is_refused(word, says):
    config = run_config(*SHORT, word)
    with pytest.raises(ValueError, match=rf"{word} builds {__name__}\.{says}"):
        assemble.labelled_splits(config.data)
        network_of(config, 19)


def test_a_head_that_returns_no_features_is_refused(monkeypatch):
    monkeypatch.setattr(Even, "forward", lambda self, features: self.layers(features).mean(dim=(2, 3)))
    config = run_config(*SHORT, "head=even")
    network = network_of(config, 19)
    says = r"^head=even: Even returned \(2, 19\): expected \(N, 19, h, w\), as its out_channels say$"
    with pytest.raises(ValueError, match=says), parts_named(config):
        network(torch.zeros(2, 3, 64, 64))


def test_a_body_of_other_channels_than_it_says_is_refused():
    network = network_of(run_config(*SHORT), 19)
    channels = network.body.out_channels
    network.body.register_forward_hook(lambda body, args, features: features.repeat(1, 2, 1, 1))
    says = rf"^ResNet returned \(2, {2 * channels}, 8, 8\): expected \(N, {channels}, h, w\), as its out_channels say$"
    with pytest.raises(ValueError, match=says):
        network(torch.zeros(2, 3, 64, 64))


class Mosaic:
    """Four crops in one, each at half its size."""

    mixes = 3

    def __call__(self, image, label, rng, others):
        rows, columns = (side // 2 for side in label.shape)
        for place, (crop, crop_label) in enumerate([(image.copy(), label.copy()), *others]):
            cell = np.s_[place // 2 * rows :, place % 2 * columns :]
            image[cell][:rows, :columns], label[cell][:rows, :columns] = crop[::2, ::2], crop_label[::2, ::2]
        return image, label


def test_mixed_crops_are_the_same_when_a_run_is_resumed_and_with_any_number_of_workers():
    config = run_config(*SHORT, "augmentations=[mosaic]")
    train_set, _ = assemble.labelled_splits(config.data)
    loaders = (assemble.training_loader(config, train_set, 4, World(), start) for start in (0, 2))
    whole, resumed = map(list, loaders)
    config.data.workers = 2
    [*_, last] = assemble.training_loader(config, train_set, 4, World(), 1)
    for minibatch, expected in ((resumed[0], whole[2]), (resumed[1], whole[3]), (last, whole[3])):
        assert torch.equal(minibatch["image"], expected["image"]) and torch.equal(minibatch["label"], expected["label"])
    plain = next(iter(assemble.training_loader(run_config(*SHORT), train_set, 4, World())))
    assert plain["name"] == whole[0]["name"]
    assert torch.equal(whole[0]["image"][..., :32, :32], plain["image"][..., ::2, ::2])


@pytest.mark.parametrize("mixes, entry", [(3, "train_imagenet"), *((number, "train_seg") for number in (-1, 65, "2"))])
def test_crops_that_cannot_be_mixed_are_refused_by_name(mixes, entry, monkeypatch):
    monkeypatch.setattr(Mosaic, "mixes", mixes)
    with pytest.raises(ValueError, match=f"^augmentations=mosaic has mixes={mixes!r}: expected a whole number"):
        assemble.data.augmentations(checked(entry, "augmentations=[mosaic]"))


OWN = (  # group, class, name, what it builds
    ("loss", Loss, "watching", Watching),
    ("loss", Loss, "made", f"{__name__}.made_by_a_function"),
    ("loss", Loss, "trained", Trained),
    ("head", Head, "even", Even),
    ("logger", Logger, "table", Table),
    ("sampler", Sampler, "named", Named),
    ("scores", Score, "countless", f"{__name__}.without_counts"),
    ("loss", Loss, "per_cell", PerCell),
    ("loss", Loss, "failing", Failing),
    ("loss", Loss, "of_another_file", OfAnotherFile),
    ("loss", Loss, "by_function", f"{__name__}.failing_by_a_function"),
    ("lr_schedule", LRSchedule, "short_cycle", f"{__name__}.short_cycle"),
    ("lr_schedule", LRSchedule, "plateau", f"{__name__}.plateau"),
    (
        "data",
        SegmentationData,
        "memory",
        Row(lambda _, split: InMemory(split), {"train": None, "val": None}, classes=2),
    ),
    ("data", SegmentationData, "plain_images", Row(PlainImages, {"train": None, "val": None}, classes=2)),
    ("body", Body, "library_network", f"{__name__}.library_network"),
    ("augmentations", Augmentation, "alone", f"{__name__}.for_two"),
    ("augmentations", Augmentation, "mosaic", Mosaic),
)
