"""The frame of all benchmarks. No test asserts a time."""

import json
import os
import shlex
import signal
import subprocess
import sys
from contextlib import suppress
from functools import partial

import pytest
import torch
from torch import nn

from benchmarks import frame, layers, networks, reversible, steps
from benchmarks.measuring import captured, interleaved
from engine.configuration.command_line import checked
from tests.cuda import NEEDS_CUDA
from tests.runs import REPOSITORY

pytestmark = pytest.mark.slow


def test_every_round_calls_every_timer_once_in_a_new_order():
    calls: list[str] = []
    times_ms = interleaved({name: lambda name=name: calls.append(name) or len(calls) for name in "abc"}, rounds=5)
    rounds = ["".join(calls[i : i + 3]) for i in range(0, 15, 3)]
    assert len({*rounds}) > 1 and all({*names} == {*"abc"} for names in rounds)
    assert times_ms["a"] == [number for number, name in enumerate(calls, 1) if name == "a"]


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=NEEDS_CUDA)])
def test_captured_steps_compute_what_steps_do_after_others_were_captured(device):
    """Nothing but the replay keeps a network, whose gradients are then compared."""
    replays, expected, gradients = [], [], []
    for seed in range(3):
        torch.manual_seed(seed)
        network, x = nn.Linear(1024, 1024, device=device), torch.randn(64, 1024, device=device)
        step = partial(networks.training_step, networks.WithLoss(network), x, "float32")
        step()
        replays.append(captured(step))
        gradients.append(network.weight.grad)
        expected.append(network.weight.grad.clone())
    del network, x, step
    torch.cuda.empty_cache()
    for replay, gradient, wanted in zip(replays, gradients, expected, strict=True):
        gradient.fill_(7.0)
        replay()
        torch.testing.assert_close(gradient, wanted)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells a process that its parent has ended")
def test_a_process_that_starts_after_its_parent_has_ended_ends_too():
    """It would keep its memory, on a card too, and the output open. `timeout` stops a benchmark in the same way."""
    start = "import os; from benchmarks.measuring import process; process(1).submit(int); os._exit(3)"
    options = {"cwd": REPOSITORY, "stdout": subprocess.PIPE, "start_new_session": True}
    process = subprocess.Popen([sys.executable, "-c", start], **options)
    try:
        process.communicate(timeout=120)  # until nobody has the output open
        assert process.returncode == 3
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def test_a_recorded_command_gives_the_same_arguments():
    options = ["recipe=null", "parts=[compile]", 'overrides=["norm.backend=eager","data.workers=0"]']
    typed = checked("steps", "out=x.json", *options)
    words = shlex.split(frame.command_of(steps.BENCHMARK, typed, ["start1"]))
    assert words[:3] == ["python", "-m", "benchmarks.steps"]
    assert {*words[3:]} == {*options, "only=[start1]", "out=FILE.json"}


IMPOSSIBLE = [  # (command, options, message)
    (layers, "device=cuda", "PyTorch sees no CUDA device"),
    (layers, "dtypes=[float16]", "each one of float32, bfloat16"),
    (layers, "captured=true", "captured=true needs device=cuda: device=cpu has no CUDA graphs"),
    (layers, "out=page.md", "ends in .json"),
    (steps, "parts=[all]", "parts=.*one of switches, norms, allocation, recompute, compile, card, capture"),
    (reversible, "only=[depths/]", "only=depths/: there is no such item; the nearest names are depths/"),
]


@pytest.mark.parametrize("command, options, message", IMPOSSIBLE)
def test_impossible_arguments_are_refused(command, options, message, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        command.run(checked(command.__name__.rpartition(".")[2], "out=file.json", *options.split()))


@pytest.mark.usefixtures("in_process")
def test_a_call_goes_on_with_what_is_missing_and_what_cannot_be_the_same_call_is_another(monkeypatch, tmp_path):
    """Other arguments, hardware, versions or commits; a call whose code is gone is on its page as text."""
    measured, out = [], tmp_path / "record.json"

    def measure(arguments: frame.TimedArguments, value: str) -> list[dict]:
        measured.append(value)
        if measured.count(value) == 1 and value != "a":
            raise RuntimeError("out of memory\nat length") if value == "fails" else KeyboardInterrupt
        return [{"what": value}]

    def carried_out(**options: object) -> tuple[list[dict], str]:
        text = frame.carry_out(benchmark, frame.TimedArguments(out=str(out), **options))
        return json.loads(out.read_text())["calls"], text

    items = {"a/1": ("a",), "a/2": ("fails",), "b": ("stops",)}
    parts = {"items": lambda arguments: items, "measure": measure, "schema": frame.TimedArguments}
    benchmark = reversible.BENCHMARK._replace(**parts, sections=lambda call, picture: [str(frame.rows_of(call))])
    with pytest.raises(KeyboardInterrupt):
        carried_out()
    (call,), text = carried_out(only=["a/1"])
    assert call["items"] == {"a/1": [{"what": "a"}], "a/2": [{"reason": "failed: RuntimeError: out of memory"}]}
    assert call["command"].endswith("only=[a/1,a/2] out=FILE.json")
    assert "- a/2: failed: RuntimeError: out of memory" in text
    (call,), text = carried_out()
    assert list(call["items"]) == [*items] and "only=" not in call["command"] and "failed" not in text
    assert measured == ["a", "fails", "stops", "fails", "stops"]
    calls, _ = carried_out(rounds=3)
    assert len(calls) == 2 and calls[0] == call
    environment = frame.provenance(frame.PACKAGES)
    for number, changed in enumerate(({}, {"hardware": "x"}, {"versions": {"torch": "3.0"}}, {"commit": "x"})):
        monkeypatch.setattr(frame, "provenance", lambda *_, changed=changed: environment | changed)
        assert len(carried_out(only=["a/1"])[0]) == 2 + number
    monkeypatch.setattr(frame, "provenance", lambda *_: environment)
    out.write_text(frame.json_lines({"calls": [call | {"code": "8cc01ed6"}]}))
    calls, text = carried_out(only=["a/1"])
    assert len(calls) == 2 and text.count("## ") == 1
