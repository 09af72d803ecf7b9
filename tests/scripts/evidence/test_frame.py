"""The frame of all benchmarks. No test asserts a time."""

import gc
import importlib
import os
import subprocess
import sys
import time
import weakref
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest
import torch

from engine.configuration.command_line import composed
from keepless.saved import saved_for_backward
from scripts.evidence import abn, loader, networks, training
from scripts.evidence.frame import command_line, interleaved, longer, ratio_of
from scripts.evidence.measuring import Elsewhere, peak_bytes
from tests.runs import REPOSITORY

RUN = {"abn": abn.run, "loader": loader.run, "training": training.run, "networks": networks.run}


def test_every_round_calls_every_timer_once_in_a_new_order():
    calls: list[tuple[int, str]] = []
    timers = {name: lambda number, name=name: calls.append((number, name)) or float(number) for name in "abc"}
    times_ms = interleaved({**timers, "d": lambda number: None if number > 1 else 7.0}, rounds=5)
    assert times_ms == {**dict.fromkeys("abc", [0.0, 1.0, 2.0, 3.0, 4.0]), "d": [7.0, 7.0]}
    rounds = [calls[i : i + 3] for i in range(0, 15, 3)]
    assert all(sorted(names) == [(number, name) for name in "abc"] for number, names in enumerate(rounds))
    assert len({tuple(name for _, name in names) for names in rounds}) > 1


def test_ratios_are_taken_within_a_round():
    """The quotient of the medians is 4: the rounds differ in cost."""
    ratio = ratio_of([4.0, 20.0, 100.0], [1.0, 10.0, 5.0])
    assert ratio == (4.0, 3.0, 12.0) and f"{ratio:.1f}" == "4.0 (3.0 – 12.0)"
    assert ratio_of([3.0], [2.0]) == (1.5, 1.5, 1.5)
    assert longer({"a": 1.004, "b": 1.2, "c": 0.9}) == "b (1.20)" and longer({}) == "none"


CALLS_A_BUSY_PROCESS = """
import importlib, os, sys
from scripts.evidence.measuring import Elsewhere
if __name__ == "__main__":
    process = Elsewhere(importlib.import_module, "os")
    print(process.call("getpid"), flush=True)
    process.call("open", sys.argv[1], os.O_RDONLY)  # waits until someone writes
"""


@pytest.mark.slow
def test_a_measuring_process_ends_with_its_parent(tmp_path):
    """Even if the parent is killed while the process is busy."""
    os.mkfifo(tmp_path / "pipe")
    command = [sys.executable, "-c", CALLS_A_BUSY_PROCESS, tmp_path / "pipe"]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = Path("/proc") / parent.stdout.readline().strip()
        assert child.is_dir()
        parent.kill()
    deadline = time.monotonic() + 60
    while child.is_dir():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_peak_bytes_are_those_of_tensors_that_live_together():
    assert peak_bytes(lambda: torch.empty(1000).neg().neg(), "cpu") == 2 * 1000 * 4


def test_the_peak_has_the_gradients_of_one_step():
    """Gradients of the step before would be subtracted when this step frees them."""
    network = torch.nn.Linear(1000, 1000, bias=False)

    def step() -> None:
        loss = network.weight.square().sum()
        network.zero_grad()
        loss.backward()

    assert len({peak_bytes(step, "cpu", network) for _ in range(2)}) == 1


def test_objects_elsewhere_answer_fail_and_end(tmp_path):
    with Elsewhere(importlib.import_module, "os") as there:
        there.call("chdir", tmp_path)
        with pytest.raises(FileNotFoundError):
            there.call("stat", "nowhere")
        assert there.call("getcwd") == str(tmp_path) != os.getcwd()
        with pytest.raises(BrokenProcessPool):
            there.call("_exit", 3)


@pytest.mark.slow
def test_an_object_that_cannot_be_made_elsewhere_says_why():
    with Elsewhere(int, "seven") as there, pytest.raises(ValueError, match="seven"):
        there.call("bit_length")


def test_the_command_line_says_what_is_not_the_default():
    for name, arguments, options in (
        ("abn", abn.AbnArguments(device="cpu", dtypes=["bfloat16"], rounds=3), "dtypes=[bfloat16] rounds=3"),
        ("training", training.TrainingArguments(recipe=None, parts=["compile"]), "recipe=null parts=[compile]"),
        (
            "networks",
            networks.NetworksArguments(only=["resnet18", "timm/densenet121"]),
            "only=[resnet18,timm/densenet121]",
        ),
    ):
        command = command_line(name, arguments)
        assert command == f"python -m scripts.evidence.{name} {options} out=FILE.json"
        values = composed(name, *command.split()[3:])
        assert all(values[key] == value for key, value in vars(arguments).items() if key != "out")


IMPOSSIBLE = {  # {benchmark: {options: message}}
    "abn": {
        "device=tpu": "device=tpu: expected one of cpu, cuda",
        "device=cuda": "PyTorch sees no CUDA device",
        "dtypes=[float16]": "expected some of float32, bfloat16",
        "groups=[]": "expected some of bn_act",
        "backend=cuda": "choose one of auto",
        "rounds=0": "rounds=0: expected a number above 0",
        "channels=[7] pixels=[4]": "expected even numbers",
        "channels=[8,8] pixels=[4]": "expected lists of the same length",
        "out=page.md": "ends in .json",
        "out=???": "out has no value",
        "measure=false": "does not exist",
    },
    "loader": {"rounds=0": "rounds", "png_size=[8,8]": "png_size"},
    "training": {
        "device=cuda": "PyTorch sees no CUDA device",
        "parts=[all]": "parts=.*some of overhead, switches, data, norms, allocation, recompute, compile",
    },
    "networks": {
        "device=cuda": "PyTorch sees no CUDA device",
        "images=1": "images=1: expected 2 or more",
        "only=[resnet51]": "only=resnet51: .* nearest names are resnet50, ",
    },
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_impossible_arguments_are_refused(name, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    for options, message in IMPOSSIBLE[name].items():
        with pytest.raises(ValueError, match=message):
            RUN[name](composed(name, "out=file.json", *options.split()))


def test_counted_tensors_are_freed_with_their_graph():
    """Also the outputs that operations save."""
    result, saved = saved_for_backward(lambda: torch.ones(2, requires_grad=True).exp().sigmoid())
    kept = weakref.WeakSet(saved)
    assert len(kept) == 2
    del result, saved
    gc.collect()
    assert not kept
