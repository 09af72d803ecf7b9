"""`keepless.prove`: right budgets are proved, faults that keepless cannot see are found, and no trace is left."""

import copy
import ctypes
import random
import subprocess
import sys
from collections.abc import Callable
from math import inf, nan
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu

from keepless import prove, recompute_activations
from keepless.prove import __main__ as command
from keepless.prove.proof import KINDS, Difference, Steps, proof_of
from keepless.torch_internals import current_hooks
from tests.runs import REPOSITORY

EQUAL = Difference(0.0, 0.0, "")
X = torch.randn(16, 3, 32, 32)


class Layers(nn.Module):
    """Layers with activations between them, whose results it holds. `after` gets the network and its output."""

    def __init__(self, after: "Callable[[Layers, Tensor], Any]" = lambda network, out: None) -> None:
        super().__init__()
        self.layers, self.norm = nn.ModuleList(nn.Conv2d(3, 3, 1) for _ in range(4)), nn.BatchNorm2d(3)
        self.between: list[Tensor] = []
        self.after = after

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        for layer in self.layers:
            x = F.gelu(layer(x))
            self.between.append(x)
        self.after(self, out := x.mean())
        return out


class Changing(Layers):
    """Each step changes its attributes, its input and the states of generators, which change the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.steps, self.generator = [[1]], torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        self.steps[0][0] += 1
        with torch.no_grad():
            x += 0.1
        noise = torch.rand(1, generator=self.generator) + random.random() + np.random.rand()
        return super().forward(F.dropout(x, 0.2)) * (noise + len(self.between) + self.steps[0][0])


@pytest.mark.parametrize("has_gradients", [False, True])
def test_a_budget_is_proved_and_the_state_put_back(has_gradients):
    network, x = recompute_activations(Changing(), budget="1GiB"), X.clone()
    for parameter in network.parameters():
        parameter.grad = torch.ones_like(parameter) if has_gradients else None

    def state() -> tuple[list[Tensor], list[Any]]:
        gradients = [parameter.grad for parameter in network.parameters() if parameter.grad is not None]
        states = network.generator.get_state(), torch.get_rng_state()
        attributes = network.steps, network.between, random.getstate(), str(np.random.get_state())
        return [x, *network.state_dict().values(), *gradients, *states], [*attributes, [*network._forward_hooks]]

    tensors, attributes = copy.deepcopy(state())
    proof = prove(network, x, 0.9)
    baseline, prepared = proof.baseline, proof.prepared
    assert all(getattr(proof, kind) == EQUAL for kind in KINDS) and not proof.broken and not prepared.warnings
    assert prepared.peak == pytest.approx(prepared.planned, rel=0.02) and prepared.peak < 0.92 * baseline.peak
    assert proof.budget == int(0.9 * baseline.peak) - baseline.coming and proof.time > 0 and baseline.fits
    assert baseline.coming == (0 if has_gradients else sum(parameter.nbytes for parameter in network.parameters()))
    assert f"{proof}".splitlines()[::7] == ["outputs    equal", "proved"]
    torch.testing.assert_close(state()[0], tensors, rtol=0, atol=0)
    assert state()[1] == attributes


def written_in_memory(network: Layers, out: Tensor) -> None:
    """In C, after the layers have read it."""
    for tensor in network.between[:-1]:
        if type(tensor) is Tensor:  # no fake one
            ctypes.memset(tensor.data_ptr(), 0, tensor.nbytes)


def written_in_a_hook(network: Layers, out: Tensor) -> None:
    def write(gradient: Tensor) -> None:
        for tensor in network.between[:-1]:
            tensor.untyped_storage().fill_(0)

    network.between[-1].register_hook(write)


def written_as_data(network: Layers, out: Tensor) -> None:
    def write(gradients: Any) -> None:
        for tensor in network.between[:-1]:
            tensor.data.zero_()

    out.grad_fn.register_prehook(write)


@pytest.mark.parametrize("fault", [written_in_memory, written_in_a_hook, written_as_data])
def test_what_a_program_writes_unseen_is_found_in_the_first_gradient_that_differs(fault):
    proof = prove(Layers(fault), X, 0.9)
    assert proof.gradients.norm > 0.001 and proof.gradients.noise == 0 and "layers." in proof.gradients.first
    assert "gradients" in proof.broken and (proof.outputs, proof.buffers, proof.random) == (EQUAL, EQUAL, EQUAL)


def test_a_budget_that_is_missed_or_not_planned_is_not_proved():
    proof = prove(Layers(), X, "100KiB")
    assert proof.broken == ["peak"] and proof.gradients == EQUAL and proof.prepared.peak > 2 * proof.budget
    assert any("no plan keeps this step within 100.0 KiB" in text for text in proof.prepared.warnings)
    with save_on_cpu():  # which decides what is saved
        proof = prove(Layers(), X, "100KiB")
    assert proof.broken == ["plan (there is none)", "peak"] and proof.prepared.planned == 0


def fails_alone(network: Layers, out: Tensor) -> None:
    if current_hooks() is None and not network._forward_hooks:
        raise torch.OutOfMemoryError("too much")


def test_a_baseline_that_does_not_fit_in_memory_is_compared_and_its_peak_estimated():
    proof, fitting = prove(Layers(fails_alone), X, 0.9), prove(Layers(), X, 0.9)
    assert not proof.broken and not proof.baseline.fits and fitting.baseline.fits
    assert proof.baseline.peak == pytest.approx(fitting.baseline.peak, rel=0.02)


def draws_alone(network: Layers, out: Tensor) -> None:
    if current_hooks() is None and not network._forward_hooks:
        torch.rand(1)


def test_other_random_numbers_are_not_as_promised():
    assert "random" in prove(Layers(draws_alone), X, 0.9).broken


STEP = {kind: {"a": torch.tensor([3.0, nan, inf, 4.0]), "b": torch.tensor([0.5])} for kind in KINDS}


def steps(change: float = 0.0, name: str = "a", **fields: Any) -> Steps:
    """Three steps, in the second of which a gradient differs."""
    changed = STEP | {"gradients": STEP["gradients"] | {name: STEP["gradients"][name] + change}}
    return Steps([STEP, changed, STEP], 2000, 1.0, 100, fields.pop("warnings", ()), **{"planned": 1900} | fields)


@pytest.mark.parametrize(
    "again, prepared, first, broken",
    [
        (steps(1e-5), steps(2e-5), "", []),
        (steps(1e-5), steps(1e-3, "b"), "b", ["gradients"]),
        (steps(), steps(nan), "a", ["gradients"]),
        (steps(), steps()._replace(results=[STEP | {"gradients": {}}] * 3), "b", ["gradients"]),
        (steps(0.1), steps(0.1), "", ["baseline (it differs by itself)"]),
        (steps(), steps(planned=0)._replace(peak=2200), "", ["plan (there is none)", "peak"]),
    ],
)
def test_what_differs_by_more_than_baseline_steps_is_not_as_promised(again, prepared, first, broken):
    proof = proof_of(steps(order=["b", "a"]), again, prepared, 2000)
    assert (proof.gradients.first, proof.broken) == (first, broken)


def test_warnings_of_the_network_are_no_news():
    prepared = steps(warnings=["of the network", "a part is not planned"])
    proof = proof_of(steps(warnings=["of the network"]), steps(), prepared, 2000)
    assert proof.prepared.warnings == ["a part is not planned"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((nn.ModuleList(), X, 0.5), "prove got a ModuleList, whose forward pass is never called"),
        ((Layers(), X, X), "budget=tensor.*: expected at least 1000 bytes"),
        ((Layers(), X, "6"), "budget='6': expected at least 1000 bytes"),
        ((Layers(), (2, 3), 0.5), r"example=\(2, 3\) has no tensor"),
        ((Layers().requires_grad_(False), X, 0.5), "no output of the network needs a gradient"),
    ],
)
def test_what_is_wrong_is_said(arguments, message):
    with pytest.raises(ValueError, match=message):
        prove(*arguments)


MODULE = """
import os
import signal
import torch

@torch.library.custom_op("my_networks::scaled", mutates_args=())
def scaled(x: torch.Tensor) -> torch.Tensor:
    global calls
    calls += 1
    return x * calls

calls = 0
scaled.register_fake(torch.empty_like)
scaled.register_autograd(lambda ctx, gradient: gradient)

class Scaled(torch.nn.Module):
    def forward(self, x):
        return scaled(x)

def layers():
    parts = [part for _ in range(3) for part in (torch.nn.Linear(64, 64), torch.nn.GELU())]
    return torch.nn.Sequential(*parts), {"input": torch.zeros(4096, 64)}

def counting():
    parts = [part for _ in range(3) for part in (Scaled(), torch.nn.GELU())]  # save results of Scaled alone
    return torch.nn.Sequential(torch.nn.Linear(64, 64), *parts), {"input": torch.zeros(4096, 64)}

def killed():
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow("each proof starts three processes")
@pytest.mark.parametrize(
    "name, status, last",
    [
        ("layers", 0, "proved"),
        ("counting", 1, "not as promised: "),
        ("killed", 1, "python -m keepless.prove: a process that runs steps of my_networks:killed's network was killed"),
    ],
)
def test_the_command_runs_each_kind_of_steps_in_a_process_of_its_own(name, status, last, tmp_path):
    """A global counter, which begins anew in each, shows that a prepared step calls an operator again."""
    (tmp_path / "my_networks.py").write_text(MODULE)
    run = [sys.executable, "-W", "error:::runpy", "-m", "keepless.prove", f"my_networks:{name}", "--budget", "0.8"]
    done = subprocess.run(run, cwd=tmp_path, env={"PYTHONPATH": str(REPOSITORY)}, capture_output=True, text=True)
    assert done.returncode == status, done.stderr
    assert (done.stdout or done.stderr).splitlines()[-1].startswith(last)


def test_a_wrong_budget_is_named_before_the_network_is_made():
    with pytest.raises(ValueError, match="budget='12'"):
        command.main(["nowhere:step", "--budget", "12"])
