"""NaN, infinity and out of memory in the fifth step of a run."""

import re
from functools import partial

import pytest
import torch

from engine.checkpoint import files as checkpoint
from engine.segmentation import inference
from engine.training.learner import Learner
from tests.faults.runs import Run, before_call, case, survived


def nan_weight(learner, loss) -> None:
    next(learner.network.cls.parameters()).data[0] = float("nan")


def nan_loss(learner, loss) -> None:
    loss.data.fill_(float("nan"))


def inf_gradient(learner) -> None:
    next(learner.network.cls.parameters()).grad.fill_(float("inf"))


def out_of_memory(*_) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")


def no_memory(*_) -> None:
    torch.empty(2**60, dtype=torch.uint8)


CROPS = "out of memory in step 5 with 4 crops of 64x64 pixels at a time.*"
FEWER = CROPS + "twice the trainer.accumulation_steps or processes"
SMALLER = CROPS + "data.crop_size=45"
LOSS = "step 5: the loss is nan; the weights with the"
GRADIENT = r"step 5: the gradient is inf; 1 of \d+ are not finite, cls.* first; the gradient with the largest norm is"
CASES = [
    case("NaN or infinity", "the loss of a step is NaN", nan_loss, LOSS, slow=False),
    case("NaN or infinity", "a weight is NaN", nan_weight, "step 5: .*not finite|step 6: the loss is nan"),
    case("NaN or infinity", "a gradient is infinite", inf_gradient, GRADIENT),
    case("out of memory", "torch.OutOfMemoryError in a step", out_of_memory, FEWER),
    case("out of memory", "the CPU's allocator is asked for 2^60 bytes in a step", no_memory, SMALLER),
]


@pytest.mark.parametrize("fault, message", CASES)
def test_the_message_names_it_and_the_checkpoint_before_it_continues(tmp_path, whole, fault, message):
    method = "gradient_norm" if fault is inf_gradient else "backward"
    run = Run(tmp_path / "run", inject=partial(before_call, Learner, method, 5, fault))
    assert re.search(f"error: {message}", run.fails()), run.output
    state = checkpoint.load(run.last)
    assert all(tensor.isfinite().all() for tensor in state["network"].values())
    if "memory" not in message:
        assert f"The last good checkpoint is {run.last}, of step {state['step']}: with another run_dir" in run.output
    survived(tmp_path / "run", whole)


def out_of_memory_evaluating() -> None:
    before_call(inference, "_predict", None, no_memory)


@pytest.mark.faults
@pytest.mark.injects("out of memory", "the CPU's allocator is asked for 2^60 bytes in an evaluation")
def test_an_evaluation_out_of_memory(tmp_path, whole):
    run = Run(tmp_path / "run", inject=out_of_memory_evaluating)
    run.fails("error: out of memory while an image of ", "window.size=1024")
    survived(tmp_path / "run", whole)
