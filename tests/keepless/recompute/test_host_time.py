"""What a recording costs in Python, held by counts that do not depend on the machine."""

import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import keepless
from keepless import InPlaceABN, recompute_activations
from keepless.recompute.passes.recording import Recording
from keepless.recompute.step.dry import rehearsed_step
from keepless.recompute.step.step import Kind
from tests.keepless.recompute.ahead import After
from tests.keepless.recompute.networks import blocks

FOLDER = str(Path(keepless.__file__).parent)


def counted(run: Callable[[], object]) -> Counter[str]:
    counts: Counter[str] = Counter()

    def see(frame, event, argument):
        code = frame.f_code
        counts["of everything"] += event in ("call", "c_call")
        if event == "call" and code.co_filename.startswith(FOLDER) and not code.co_name.startswith("<"):
            counts["calls"] += 1
            if code.co_name == "__init__":
                counts[type(frame.f_locals["self"]).__name__] += 1

    before = sys.getprofile()
    sys.setprofile(see)
    try:
        run()
    finally:
        sys.setprofile(before)
    return counts


BLOCKS: dict[str, Callable[[], list[nn.Module]]] = {
    "norms": lambda: [nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()],
    "ours": lambda: [nn.Conv2d(4, 4, 3, padding=1), InPlaceABN(4)],
    "linear layers": lambda: [nn.Linear(8, 8)],
}


def per_block(name: str, prepared: Callable[[nn.Module], Callable[[torch.Tensor], object]]) -> dict[str, float]:
    """Calls of this package in a forward pass after the first, for each further block."""
    counts = []
    for number in (2, 4):
        run = prepared(nn.Sequential(*(layer for _ in range(number) for layer in BLOCKS[name]())))
        x = torch.randn(2, 4, 8, 8)
        run(x)
        three = [counted(partial(run, x)) for _ in range(3)]  # objects that earlier tests have left may be freed in one
        counts.append(min(three, key=lambda counts: counts["calls"]))
    return {name: (counts[1][name] - counts[0][name]) / 2 for name in counts[1]}


# Of a convolution, a norm and an activation, the results of the last two are dropped, and saved as their recipes. The
# convolution's result and the norm's weight are kept for recipes, and the next weight. This takes five calls of the
# mode, four of them by their advice (the fifth is a question), hooks that see three tensors, and two rules, which look
# up four arguments and two statistics. A layer of ours drops nothing, but its hooks see four tensors. A linear layer
# is called at once, although PyTorch saves a view of its input: the input is kept.
@pytest.mark.parametrize(
    "name, recipes, kept, calls", [("norms", 2, 3, 51), ("ours", 0, 5, 56), ("linear layers", 0, 0, 1)]
)
def test_what_a_block_takes_with_advice(name, recipes, kept, calls):
    counts = per_block(name, recompute_activations)
    assert counts.get("Recipe", 0) == recipes and counts.get("Saved", 0) <= recipes and counts.get("Kept", 0) <= kept
    assert counts["calls"] <= calls and "Call" not in counts


def test_what_a_block_takes_while_the_rules_decide():
    """As in the first step, and in the rest of a step that leaves its plan. Fake CUDA tensors stand for a card."""

    def recorded(network: nn.Module) -> Callable:
        def run(x: torch.Tensor) -> torch.Tensor:
            with Recording(inputs=[x]):
                return network(x)

        return run

    with FakeTensorMode(), torch.device("cuda"):
        counts = per_block("norms", recorded)
    assert counts["Recipe"] == 2  # the norm's and the activation's
    assert counts["Saved"] <= 3 and counts["Value"] <= 4  # beside those: of the convolution's result and the bias
    assert counts["Call"] <= 4  # with the norm's counter of minibatches, but not its check of dimensions
    # Six look up storages: a finaliser of each would be fewer, but swallow Ctrl-C.
    assert counts["calls"] <= 1.03 * 250  # a few depend on what runs before


@pytest.mark.table
@pytest.mark.parametrize("budget, calls", [(None, 2717), (0.5, 3057)])
def test_a_steady_step_of_many_small_calls(budget, calls, monkeypatch):
    """Python's and C's calls, 411 of which are the plain network's. Times are estimated: a plan is the same.

    Calls of the unpack hook in the backward pass count, too. A `methodcaller` would not, but takes twice as long.
    """
    monkeypatch.setattr("keepless.recompute.step.counting.cost_of", lambda operator: None)
    monkeypatch.setattr("keepless.recompute.step.watch.HOST_SECONDS", 12e-6)
    network, x = blocks(10, nn.BatchNorm2d(8), nn.ReLU(inplace=True)), torch.randn(2, 3, 32, 32)
    recompute_activations(network, budget=budget)

    def step() -> None:
        network(x).square().mean().backward()

    for _ in range(4):  # with a budget: planned, and recorded for the first time
        step()
    assert counted(step)["of everything"] <= 1.03 * calls


def test_a_plan_counts_the_host_for_each_repeated_call_and_each_save_of_its_result(monkeypatch):
    """So a budget repeats no more small calls than it must."""
    monkeypatch.setattr("keepless.recompute.step.watch.HOST_SECONDS", 1.0)
    step = rehearsed_step(
        nn.Sequential(nn.Conv2d(3, 4, 1), nn.Sigmoid(), nn.Conv2d(4, 4, 1)), (torch.randn(2, 3, 8, 8),), {}
    )
    saves = Counter(save.value for save in step.saved)
    seconds = {saves[number]: value.seconds for number, value in enumerate(step.values) if value.kind == Kind.FREE}
    assert {count: round(time, 1) for count, time in seconds.items()} == {0: 3, 2: 8}


def test_a_step_that_fits_as_it_is_makes_nothing():
    """Nor for calls like `x.contiguous()`, which have a rule but return their argument here."""
    same = After(nn.ReLU(), lambda x: x.to(x.dtype).reshape(x.shape).contiguous())
    network = nn.Sequential(nn.Conv1d(4, 4, 1), same, nn.Conv1d(4, 4, 1), nn.GELU(), nn.Conv1d(4, 4, 1))
    recompute_activations(network, budget="1GiB")
    x = torch.randn(2, 4, 64)
    for _ in range(2):  # planned, and recorded for the first time
        network(x).sum().backward()
    counts = counted(partial(network, x))
    assert counts.keys().isdisjoint(("Call", "Recipe", "Value", "Saved", "Kept", "Signs"))
