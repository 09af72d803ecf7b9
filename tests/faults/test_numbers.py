"""NaN, infinity and out of memory in the fifth step of a run."""

import re

import pytest
import torch

from engine import checkpoint
from engine.learner import Learner
from tests.faults.runs import Run, survived

LONG = pytest.mark.faults


def in_step_five(method: str, fault) -> None:
    """In the fifth step, call `fault(learner, *args)` before a method of the learner."""
    original, calls = getattr(Learner, method), []

    def patched(self, *args):
        calls.append(None)
        if len(calls) == 5:
            fault(self, *args)
        return original(self, *args)

    setattr(Learner, method, patched)


def nan_weight() -> None:
    def fault(learner, loss):
        next(learner.network.cls.parameters()).data[0] = float("nan")

    in_step_five("backward", fault)


def nan_loss() -> None:
    def fault(learner, loss):
        loss.data.fill_(float("nan"))

    in_step_five("backward", fault)


def inf_gradient() -> None:
    def fault(learner):
        next(learner.network.cls.parameters()).grad.fill_(float("inf"))

    in_step_five("gradient_norm", fault)


def out_of_memory() -> None:
    def fault(learner, loss):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    in_step_five("backward", fault)


def out_of_memory_on_the_cpu() -> None:
    in_step_five("backward", lambda learner, loss: torch.empty(2**60, dtype=torch.uint8))


CROPS = "out of memory in step 5 with 4 crops of 64x64 pixels at a time.*"
CASES = [
    pytest.param(inject, message, id=inject.__name__, marks=[pytest.mark.injects(what, how), *marks])
    for inject, what, how, message, marks in (
        (nan_loss, "NaN or infinity", "the loss of a step is NaN", "step 5: the loss is nan; the weights with the", []),
        (nan_weight, "NaN or infinity", "a weight is NaN", "step 5: .*not finite|step 6: the loss is nan", [LONG]),
        (
            inf_gradient,
            *("NaN or infinity", "a gradient is infinite"),
            r"step 5: the gradient is inf; 1 of \d+ are not finite, cls.* first; the gradient with the largest norm is",
            [LONG],
        ),
        (
            out_of_memory,
            *("out of memory", "torch.OutOfMemoryError in a step", CROPS + "trainer.accumulation_steps=2", [LONG]),
        ),
        (
            out_of_memory_on_the_cpu,
            *("out of memory", "the CPU's allocator is asked for 2^60 bytes in a step"),
            *(CROPS + "data.crop_size=45", [LONG]),
        ),
    )
]


@pytest.mark.parametrize("inject, message", CASES)
def test_the_message_names_it_and_the_checkpoint_before_it_continues(tmp_path, whole, inject, message):
    run = Run(tmp_path / "run", inject=inject)
    assert run.ends() == 1, run.output
    assert re.search(f"error: {message}", run.output) and "Traceback" not in run.output, run.output
    last = tmp_path / "run" / "checkpoints" / "last.pt"
    state = checkpoint.load(last)
    assert all(tensor.isfinite().all() for tensor in state["network"].values())
    if "memory" not in message:
        assert f"The last good checkpoint is {last}, of step {state['step']}: with another run_dir" in run.output
    survived(tmp_path / "run", whole)


def out_of_memory_evaluating() -> None:
    import engine.segmentation.inference

    def predict(*args):
        torch.empty(2**60, dtype=torch.uint8)

    engine.segmentation.inference._predict = predict


@pytest.mark.faults
@pytest.mark.injects("out of memory", "the CPU's allocator is asked for 2^60 bytes in an evaluation")
def test_an_evaluation_out_of_memory(tmp_path, whole):
    run = Run(tmp_path / "run", inject=out_of_memory_evaluating)
    assert run.ends() == 1
    assert "error: out of memory while an image of " in run.output and "window.size=1024" in run.output
    assert "Traceback" not in run.output
    survived(tmp_path / "run", whole)
