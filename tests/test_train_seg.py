"""Training from configuration to results: a run's files, resuming to the bit, refusing what cannot work."""

import functools
import json
import re
import shutil
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from datasets import cityscapes
from engine.checkpoint import files as checkpoint
from engine.records.metrics_logger import MetricsLogger
from tests.cuda import NEEDS_CUDA
from tests.faults.runs import before_call
from tests.runs import NARROW_A2, SHORT, checked, same
from train_seg import train


def train_short(run_dir: Path, *overrides: str) -> dict:
    return train(checked("train_seg", f"run_dir={run_dir}", *SHORT, *overrides))


@pytest.fixture
def streets(drawn, tmp_path) -> tuple[Path, tuple[str, ...]]:
    """A copy that a test may change, and the options for it."""
    root = shutil.copytree(drawn, tmp_path / "streets")
    return root, ("data=cityscapes", f"data.root={root}")


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    return checkpoint.load(run_dir / "checkpoints" / "last.pt")["network"]


@pytest.fixture(scope="module")
def watched(tmp_path_factory) -> tuple[Path, dict, str]:
    """The directory of a run with two evaluations, its results, and what it printed."""
    run_dir = tmp_path_factory.mktemp("watched")
    periods = [f"trainer.{noun}_every_steps=2" for noun in ("evaluate", "log", "checkpoint")]
    config = checked("train_seg", f"run_dir={run_dir}", *SHORT, "trainer.steps=4", "trainer.pictures=2", *periods)
    with redirect_stdout(StringIO()) as printed:
        results = train(config, "python a b=c")
    return run_dir, results, printed.getvalue()


def test_a_run_leaves_what_the_contract_says(watched):
    run_dir, results, _ = watched
    files = {"config.yaml", "log.txt", "metrics.jsonl", "tensorboard", "checkpoints", "results.json", ".lock"}
    assert {path.name for path in run_dir.iterdir()} == files
    assert json.loads((run_dir / "results.json").read_text()) == results
    assert results["dataset"] == "synthetic" and results["split"] == "val" and results["images"] == 2
    assert len(results["iou"]) == len(results["confusion_matrix"]) == 19
    assert 0 <= results["miou"] <= 1 and 0 <= results["pixel_accuracy"] <= 1
    assert set(results["environment"]) == {"hardware", "versions", "commit"}
    state = checkpoint.load(run_dir / "checkpoints" / "last.pt")
    assert state["step"] == 4 and state["config"] == results["config"]
    kernel = state["network"]["body.mod2.block1.convs.conv2.weight"]
    assert kernel.is_contiguous(memory_format=torch.channels_last) and not kernel.is_contiguous()

    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    kinds = [(record["kind"], record["step"]) for record in records]
    assert kinds == [("train", 2), ("val", 2), ("train", 4), ("val", 4)]
    measured = {"data_wait_s", "images_per_second", "peak_memory_mib"}
    assert {*records[0]} == measured | {"kind", "step", "epoch", "loss", "lr", "gradient_norm"}
    assert records[-1]["miou"] == results["miou"]
    best = max((record for record in records if record["kind"] == "val"), key=lambda record: record["miou"])
    assert checkpoint.load(run_dir / "checkpoints" / "best.pt")["step"] == best["step"]


def test_everything_that_is_promised_can_be_watched(watched):
    run_dir, results, output = watched
    events = EventAccumulator(str(run_dir / "tensorboard")).Reload()
    names = events.Tags()["scalars"]
    assert {name.partition("/")[0] for name in names} == {"train", "val", "val_iou", "val_accuracy"}
    assert events.Scalars("val/miou")[-1].value == pytest.approx(100 * results["miou"])

    [text], config = events.Tensors("config/text_summary"), (run_dir / "config.yaml").read_text()
    assert config.startswith("# python a b=c\n")
    assert text.tensor_proto.string_val[0].decode() == f"```yaml\n{config}\n```"

    pictures = {name: [event.step for event in events.Images(name)] for name in events.Tags()["images"]}
    assert len(pictures) == 2 and all(steps == [2, 4] for steps in pictures.values())
    assert min({*names, *pictures}).startswith("train/")  # TensorBoard sorts by name

    assert "training  4 steps in " in output and f"last.pt, step 4, mIoU {100 * results['miou']:.2f} %" in output


def interrupted(run_dir, step: int, *options: str) -> None:
    """A short training that is interrupted in a step, after the weights have changed."""

    def interrupt(*_):
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(MetricsLogger, "count_step", MetricsLogger.count_step)  # put back at the end
        before_call(MetricsLogger, "count_step", step, interrupt)
        train_short(run_dir, *options)


def test_resuming_gives_the_same_weights_to_the_bit(streets, tmp_path):
    """The run is interrupted in mid-epoch, with dropout and class-uniform sampling. It resumes with another
    recomputation, makes the class index again elsewhere, and evaluates fewer images. On other data it does not resume;
    tests/engine/process/test_distributed.py resumes a finished run to its results."""
    options = (*streets[1], *NARROW_A2, "norm=std", "sampler=class_uniform", "sampler.fraction=0.5")
    options += ("trainer.steps=4", "trainer.checkpoint_every_steps=2", "trainer.evaluate_images=3")  # all
    train_short(tmp_path / "whole", *options)
    interrupted(tmp_path / "resumed", 4, *options, "trainer.recompute=blocks")
    assert checkpoint.load(tmp_path / "resumed" / "checkpoints" / "last.pt")["step"] == 2
    options += ("trainer.recompute=sqrt", f"sampler.folder={tmp_path / 'index'}", "trainer.evaluate_images=1")
    train_short(tmp_path / "resumed", *options, "resume=auto")
    assert list((tmp_path / "index").rglob("index.npz"))
    warning = "classes have no pixel in the training split and are not drawn: "
    logs = {name: (tmp_path / name / "log.txt").read_text() for name in ("whole", "resumed")}
    assert warning in logs["whole"]
    for name, suffix in (("whole", ""), ("resumed", " on 1 of 3 images")):
        assert re.search(rf"last .*, step 4, mIoU [\d.]+ %{suffix}\n", logs[name])
    for entry in cityscapes(streets[0], "train").files[:6]:
        entry.image.unlink(), entry.label.unlink()
    with pytest.raises(ValueError, match="a run on other data: training files were added, removed or renamed"):
        train_short(tmp_path / "resumed", *options, "resume=auto")
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "resumed"))


def test_a_frozen_body_stays_to_the_bit_also_in_averages(streets, watched, tmp_path):
    start = watched[0] / "checkpoints" / "last.pt"
    options = (*streets[1], f"init.weights={start}", "init.part=body", "body.frozen=true", "trainer.recompute=blocks")
    train_short(tmp_path / "run", *options, "trainer.ema_decay=0.9", "optim.weight_decay=0.1", "trainer.steps=2")
    state = checkpoint.load(tmp_path / "run" / "checkpoints" / "last.pt")
    body = {name: value for name, value in weights(watched[0]).items() if name.startswith("body.")}
    for part in ("network", "ema"):
        assert same({name: state[part][name] for name in body}, body)
    assert not same(state["network"], weights(watched[0]))
    named = {name for group in state["optimizer"]["param_groups"] for name in group["param_names"]}
    assert named and not any(name.startswith("body.") for name in named)
    log = (tmp_path / "run" / "log.txt").read_text()
    assert re.search(r"[\d,]+ parameters, [\d,]+ of them frozen", log)
    applied = f"initial weights {start}; recomputation blocks; precision float32; TF32 off; capture off; compile off; "
    rest = r"sampler uniform; frozen body; [\d,]+ parameters at lr 0.05, weight decay 0.1\n"
    assert re.search(re.escape(applied) + rest, log)


def test_bad_files_stop_a_run(streets, tmp_path):
    """They stop it before its first step, and so do splits without labels."""
    root, data = streets
    bad = cityscapes(root, "train").files[-1].label
    bad.write_bytes(bad.read_bytes()[:100])
    with pytest.raises(ValueError, match=f"{bad.name}: the PNG file is truncated"):
        train_short(tmp_path / "stops", *data, "trainer.steps=2")
    assert not (tmp_path / "stops" / "metrics.jsonl").exists()
    shutil.copytree(root / "leftImg8bit" / "val", root / "leftImg8bit" / "test")
    for key in ("data.train_split", "data.val_split"):
        with pytest.raises(ValueError, match=f"{key}=test: cityscapes has no labels"):
            train_short(tmp_path / "unlabelled", *data, f"{key}=test")
    assert not (tmp_path / "unlabelled").exists()


FEW = ("body=resnet_cifar_tiny", "body.structure=[1,1,1]", "head.dilations=[2]")  # modules to trace


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["std", "inplace"])
def test_compiling_makes_one_graph_for_each_size_of_a_part(tmp_path, monkeypatch, norm):
    """Micro-batches have 3, 2 and 2 crops. No graph breaks, before and after an evaluation. Dynamo traces but does not
    compile: no compiler is needed."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    monkeypatch.setattr("engine.training.build.check_compiler", lambda *_, **__: None)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    options = ("data.crops_per_minibatch=7", "trainer.accumulation_steps=3", f"norm={norm}", "trainer.compile=true")
    train_short(tmp_path, *FEW, *options, "trainer.steps=3", "trainer.evaluate_every_steps=2")
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == 2 and not counters["graph_break"]


def test_a_trace_shows_the_layers_of_the_profiled_steps(tmp_path):
    train_short(tmp_path, *FEW, "trainer.profile=2", "trainer.steps=13")
    events = json.loads((tmp_path / "profile" / "trace.json").read_text())["traceEvents"]
    names = [event.get("name", "") for event in events]
    assert sum(name.startswith("ProfilerStep#") for name in names) >= 2
    assert "BatchNormActivation" in names and "BatchNormActivationBackward" in names


@pytest.mark.parametrize("precision", [pytest.param(name, marks=NEEDS_CUDA) for name in ("float32", "bfloat16")])
def test_trains_on_a_gpu(tmp_path, precision):
    results = train_short(tmp_path, "trainer.steps=3", "trainer.device=cuda", f"trainer.precision={precision}")
    assert results["images"] == 2 and "NVIDIA" in results["environment"]["hardware"]
