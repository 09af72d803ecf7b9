"""The frame of all benchmarks. No test asserts a time."""

import gc
import json
import os
import signal
import subprocess
import sys
import weakref
from contextlib import suppress
from functools import partial
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn

from engine.configuration.command_line import composed
from keepless.saved import saved_for_backward
from scripts.evidence import layers, methods, networks, reversible, training
from scripts.reports import frame, measuring
from scripts.reports.markdown import ratio_of
from scripts.reports.measuring import captured, interleaved
from tests.cuda import NEEDS_CUDA
from tests.runs import REPOSITORY


def test_every_round_calls_every_timer_once_in_a_new_order():
    calls: list[str] = []
    times_ms = interleaved({name: lambda name=name: calls.append(name) or len(calls) for name in "abc"}, rounds=5)
    rounds = ["".join(calls[i : i + 3]) for i in range(0, 15, 3)]
    assert len({*rounds}) > 1 and all({*names} == {*"abc"} for names in rounds)
    assert times_ms["a"] == [number for number, name in enumerate(calls, 1) if name == "a"]


def test_ratios_are_taken_within_a_round():
    """The quotient of the medians is 4: the rounds differ in cost."""
    ratio = ratio_of([4.0, 20.0, 100.0], [1.0, 10.0, 5.0])
    assert ratio == (4.0, 3.0, 12.0) and f"{ratio:.1f}" == "4.0 (3.0 – 12.0)"
    assert ratio_of([3.0], [2.0]) == (1.5, 1.5, 1.5)


def test_a_captured_step_keeps_what_its_graph_reads(monkeypatch):
    """The next capture gives freed memory back to the device, where a replay may not read it."""
    monkeypatch.setattr(torch, "cuda", MagicMock())
    monkeypatch.setattr(measuring, "_pool", MagicMock())
    weight = torch.ones(2)
    replay, gone = captured(partial(weight.add_, 1), "cuda"), weakref.ref(weight)
    del weight
    replay()
    assert gone() is not None
    del replay
    assert gone() is None


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=NEEDS_CUDA)])
def test_captured_steps_compute_what_steps_do_after_others_were_captured(device):
    """Nothing but the replay keeps a network, whose gradients are then compared."""
    replays, expected, gradients = [], [], []
    for seed in range(3):
        torch.manual_seed(seed)
        network, x = nn.Linear(1024, 1024, device=device), torch.randn(64, 1024, device=device)
        step = partial(methods.training_step, methods.WithLoss(network), x, "float32")
        step()
        replays.append(captured(step, device))
        gradients.append(network.weight.grad)
        expected.append(network.weight.grad.clone())
    del network, x, step
    torch.cuda.empty_cache()
    for replay, gradient, wanted in zip(replays, gradients, expected, strict=True):
        gradient.fill_(7.0)
        replay()
        torch.testing.assert_close(gradient, wanted)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells a process that its parent has ended")
def test_a_process_that_starts_after_its_parent_has_ended_ends_too():
    """It would keep its memory, on a card too, and the output open. `timeout` stops a benchmark in the same way."""
    start = "import os; from scripts.reports.measuring import process; process(int).submit(int); os._exit(3)"
    process = subprocess.Popen(
        [sys.executable, "-c", start], cwd=REPOSITORY, stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        process.communicate(timeout=120)  # until nobody has the output open
        assert process.returncode == 3
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    "benchmark, options, only",
    [
        (layers, "dtypes=[bfloat16] batch=8", []),
        (training, "recipe=null parts=[compile]", ["start1"]),
        (networks, "images=4", ["resnet18", "timm/densenet121"]),
    ],
)
def test_the_command_line_says_what_is_not_the_default(benchmark, options, only):
    name, schema = benchmark.BENCHMARK.name, benchmark.BENCHMARK.schema
    typed = frame.configuration.typed(composed(name, "out=x.json", *options.split()), schema)
    command = frame.command_again(benchmark.BENCHMARK, typed, only)
    words = command.removeprefix(f"python -m scripts.evidence.{name} ").split()
    assert {*words} == {*options.split(), "out=FILE.json", *([f"only=[{','.join(only)}]"] if only else [])}


IMPOSSIBLE = [  # (command, options, message)
    (layers, "device=cuda", "PyTorch sees no CUDA device"),
    (layers, "dtypes=[float16]", "each one of float32, bfloat16"),
    (layers, "backend=cuda", "expected one of auto"),
    (layers, "captured=true", "captured=true needs device=cuda: device=cpu has no CUDA graphs"),
    (layers, "out=page.md", "ends in .json"),
    (layers, "measure=false", "does not exist"),
    (training, "parts=[all]", "parts=.*one of switches, norms, allocation, recompute, compile, card, arms"),
    (networks, "only=[resnet51]", "only=resnet51: .* nearest names are resnet50, "),
    (reversible, "only=[all]", "only=all: there is no such item"),
]


@pytest.mark.parametrize("command, options, message", IMPOSSIBLE)
def test_impossible_arguments_are_refused(command, options, message, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        command.run(composed(command.__name__.rpartition(".")[2], "out=file.json", *options.split()))


ITEMS = {"a/1": ("a",), "a/2": ("fails",), "b": ("dies",)}


@pytest.fixture
def faked(in_process, monkeypatch) -> list[str]:
    """A benchmark of three items, the last of which ends the command; returns the items that were measured."""
    measured = []

    def measure(arguments: frame.TimedArguments, what: str) -> list[dict]:
        measured.append(what)
        if what == "fails" and measured.count(what) == 1:
            raise RuntimeError("out of memory\nat length")
        if what == "dies" and measured.count(what) == 1:
            raise KeyboardInterrupt
        return [{"what": what}]

    own = {"items": lambda arguments: ITEMS, "measure": measure, "schema": frame.TimedArguments}
    fake = reversible.BENCHMARK._replace(**own, sections=lambda call, picture: [str(frame.rows_of(call))])
    monkeypatch.setattr(reversible, "BENCHMARK", fake)
    return measured


def carried_out(folder: Path, **options: object) -> tuple[list[dict], str]:
    """The calls in the record, and the tables."""
    text = frame.carry_out(reversible.BENCHMARK, frame.TimedArguments(out=str(folder / "record.json"), **options))
    return json.loads((folder / "record.json").read_text())["calls"], text


def test_a_stopped_call_goes_on_with_what_is_missing_and_another_one_is_added(faked, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        carried_out(tmp_path)
    (call,), text = carried_out(tmp_path, measure=False)
    assert call["items"] == {"a/1": [{"what": "a"}]}
    assert call["left"] == {"a/2": "failed: RuntimeError: out of memory"}
    assert "- a/2: failed: RuntimeError: out of memory" in text
    carried_out(tmp_path, only=["b"])
    assert faked == ["a", "fails", "dies", "dies"]
    (call,), _ = carried_out(tmp_path)
    assert list(call["items"]) == [*ITEMS] and call["left"] == {} and faked.count("a") == 1
    before = (tmp_path / "record.json").read_text()
    calls, text = carried_out(tmp_path, rounds=3, only=["a"])
    assert [list(call["items"]) for call in calls] == [[*ITEMS], ["a/1", "a/2"]]
    assert text.count("python -m scripts.evidence.reversible ") == 2 and "only=[a/1,a/2] rounds=3 out=" in text
    assert json.loads(before)["calls"][0] == calls[0]
    with pytest.raises(ValueError, match="only=a/: there is no such item; the nearest names are"):
        carried_out(tmp_path, only=["a/"])


def test_calls_on_other_hardware_versions_or_commits_are_others(faked, monkeypatch, tmp_path):
    now = frame.provenance()
    for changed in ({}, {"hardware": "another"}, {"versions": {"torch": "3.0"}}, {"commit": "another"}):
        monkeypatch.setattr(frame, "provenance", lambda *_, changed=changed: now | changed)
        carried_out(tmp_path, only=["a/1"])
    assert len(json.loads((tmp_path / "record.json").read_text())["calls"]) == 4


def test_a_call_whose_code_is_gone_stands_on_its_page_as_text(faked, tmp_path):
    carried_out(tmp_path, only=["a/1"])
    record = json.loads((tmp_path / "record.json").read_text())
    record["calls"][0]["code"] = "8cc01ed6"
    (tmp_path / "record.json").write_text(json.dumps(record))
    calls, text = carried_out(tmp_path, only=["a/1"])
    assert len(calls) == 2 and faked == ["a", "a"] and text.count("## ") == 1


def test_counted_tensors_are_freed_with_their_graph():
    """Here the tensors are outputs, which their operations save."""
    result, saved = saved_for_backward(lambda: torch.ones(2, requires_grad=True).exp().sigmoid())
    kept = weakref.WeakSet(saved)
    assert len(kept) == 2
    del result, saved
    gc.collect()
    assert not kept
