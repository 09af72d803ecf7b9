"""`keepless.fit`: exact bytes, the largest examples, and what its command prints."""

import copy
import subprocess
import sys
from functools import partial
from math import inf, nan
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.checkpoint import checkpoint

import keepless
from keepless import recompute_activations
from keepless.fit import __main__ as command
from keepless.fit.device import CONTEXT, FRAGMENTATION, OPTIMIZERS, WORKSPACE, bytes_for_tensors, optimizer_bytes
from keepless.fit.fit import Fit, fit
from keepless.fit.sizes import growth
from keepless.fit.steps import Way, repeated_blocks
from keepless.made_tensors import MadeTensors, bytes_of_tensors
from keepless.recompute.step.costs import peak_bytes
from keepless.recompute.step.dry import Loss
from keepless.recompute.step.recurrent import with_workspace
from keepless.torch_internals import FakeTensorMode
from keepless.units import bytes_of
from tests.runs import REPOSITORY

X = torch.randn(8, 64)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 64), nn.SiLU())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


class Blocks(nn.Module):
    def __init__(self, number: int = 6) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(number))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def device_for(tensors: int) -> int:
    """The smallest device that leaves so many bytes for tensors."""
    device = bytes_of(CONTEXT) + bytes_of(WORKSPACE) + int(tensors / (1 - FRAGMENTATION)) - 3
    return next(size for size in range(device, device + 9) if bytes_for_tensors(size) >= tensors)


def ways(fitted: Fit) -> dict[str, Way]:
    return {way.name: way for way in fitted.ways}


def step_of(forward, x: Tensor) -> None:
    outputs = forward(x)
    loss = Loss.apply(outputs)
    loss.backward(torch.empty_like(loss))


def test_bytes_equal_real_steps():
    network, x = Blocks(), torch.randn(512, 64)
    ways_by_name = ways(fit(network, x, "2GiB"))
    assert all(parameter.grad is None for parameter in network.parameters())
    weights = bytes_of_tensors(network.parameters())
    for way in ways_by_name.values():
        assert way.resident_bytes == 3 * weights + x.nbytes  # and AdamW's two states
    tracker = MemTracker()
    tracker.track_external(network, x)
    with tracker:
        step_of(network, x)
    peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    assert ways_by_name["plain"].peak == peak + 2 * weights
    checkpointed = copy.deepcopy(network)
    for block in checkpointed.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    for name, prepared in (("checkpointed", checkpointed), ("recomputed", recompute_activations(network))):
        prepared.zero_grad()
        with MadeTensors() as counted:
            step_of(prepared, x)
        assert ways_by_name[name].peak == counted.peak + ways_by_name["plain"].resident_bytes
    assert ways_by_name["plain"].time == 1 < ways_by_name["recomputed"].time < ways_by_name["checkpointed"].time


class Recurrent(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0].square().mean()


def test_a_workspace_counts_as_on_real_tensors():
    """oneDNN's LSTM keeps one, which grows with its steps and sequences: few are run."""
    network, x = Recurrent(nn.LSTM(4, 8, bidirectional=True)), torch.randn(70, 66, 4)
    way = fit(network, x, "12GiB").ways[0]
    assert way.peak - way.resident_bytes == pytest.approx(keepless.plan(network, x, budgets=[1.0]).plain, rel=0.03)


def test_a_workspace_whose_size_nothing_tells_is_refused():
    with FakeTensorMode(), pytest.raises(ValueError, match="aten._cudnn_rnn.default keeps a workspace .* count"):
        with_workspace(torch.ops.aten._cudnn_rnn.default, (torch.empty(3, 2, 4, device="cuda"),), {}, ())


@pytest.mark.slow
def test_the_line_trains_within_what_the_device_leaves():
    network, x = Blocks(2), torch.randn(16384, 64)
    plain, recomputed = (ways(fit(network, x, "2GiB"))[name].peak for name in ("plain", "recomputed"))
    fitted = fit(network, x, device_for((recomputed + plain) // 2))
    planned = ways(fitted)["within a budget"]
    assert not ways(fitted)["plain"].fits and planned.fits and planned.peak <= fitted.available
    assert fitted.line.startswith('16384 x 64: keepless.recompute_activations(network, budget="')
    eval(fitted.line.partition(": ")[2], {"keepless": keepless, "network": network})
    for _ in range(3):
        step_of(network, x)
    budget = fitted.available - planned.resident_bytes
    assert budget - 2**20 < bytes_of(fitted.line.split('"')[1]) <= budget
    assert peak_bytes(lambda: step_of(network, x), "cpu") <= 1.03 * budget


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "none"])
def test_optimisers_take_as_much_as_torch_s(name):
    makers = {
        "sgd": partial(torch.optim.SGD, lr=0.1, weight_decay=0.1),
        "momentum": partial(torch.optim.SGD, lr=0.1, weight_decay=0.1, momentum=0.9),
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
    }
    parameters = [nn.Parameter(torch.randn(100, size)) for size in (3, 70)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer = makers[name](parameters, foreach=True)
    optimizer.step()
    states = [state for of_one in optimizer.state.values() for key, state in of_one.items() if key != "step"]
    with MadeTensors() as counted:
        optimizer.step()
    assert optimizer_bytes(name, 7300, 4 * 7300) == (sum(state.nbytes for state in states), counted.peak)
    assert optimizer_bytes(2.5, 7300, 4 * 7300) == (18250, 0)


@pytest.mark.slow
def test_the_largest_batch_fits_and_one_more_does_not():
    network, x, time = Blocks(2), torch.randn(12, 512, 64), 1.3
    device = device_for(fit(network, x, "2GiB").ways[0].peak)
    ways_by_name = ways(fit(network, x[:4], device, grow="batch", time=time))
    assert ways_by_name["plain"].shape == x.shape and ways_by_name["plain"].time == 1.0

    def fits(name: str, batch: int) -> bool:
        try:
            way = ways(fit(network, x.new_zeros(batch, *x.shape[1:]), device))[name]
        except ValueError:  # nothing does
            return False
        return way.fits and way.time <= time

    for name in ("recomputed", "within a budget"):
        batch = ways_by_name[name].shape[0]
        assert batch > 12 and ways_by_name[name].fits and fits(name, batch) and not fits(name, batch + 1)
    assert ways_by_name["within a budget"].shape[0] >= ways_by_name["recomputed"].shape[0]
    assert 1 < ways_by_name["within a budget"].time <= time


def test_examples_grow_in_all_tensors_that_have_the_dimension():
    text = torch.zeros(2, 48, dtype=torch.long)
    example = ((), {"ids": text, "mask": torch.ones(2, 48), "heads": torch.ones(8)})
    longer = growth(example, "size")
    assert (longer.value, longer.step, longer.power) == (48, 16, 1)
    assert [tuple(tensor.shape) for tensor in longer.resized(80)[1].values()] == [(2, 80), (2, 80), (8,)]
    wider = growth(example, "batch")
    assert [tuple(tensor.shape) for tensor in wider.resized(5)[1].values()] == [(5, 48), (5, 48), (8,)]
    larger = growth(((torch.zeros(2, 3, 64, 96), torch.zeros(2, 64, 96)), {}), "size")  # images and labels
    assert (larger.value, larger.step, larger.power) == (64, 32, 2)
    assert [tuple(tensor.shape) for tensor in larger.resized(128)[0]] == [(2, 3, 128, 192), (2, 128, 192)]


def test_a_network_larger_than_any_machine_is_planned():
    with torch.device("meta"):
        layers = [nn.Sequential(nn.Linear(2**17, 2**17, bias=False), nn.GELU()) for _ in range(4)]
        network, x = nn.Sequential(*layers), torch.zeros(8, 2**17)
    with torch.autocast("cpu", torch.bfloat16):
        fitted = fit(network, x, "2000GiB", optimizer=2)
    assert (fitted.weights, fitted.states) == (2**38, 2**37)
    with FakeTensorMode():
        assert fit(nn.Linear(2**17, 2**17), torch.zeros(8, 2**17), "2000GiB").weights == 2**36 + 2**19


class Outputs(NamedTuple):
    logits: Tensor


class Asking(nn.Linear):
    def forward(self, x: Tensor) -> Outputs:
        return Outputs(super().forward(x if x.sum() > 0 else -x))


def test_blocks_are_repeated_classes_or_else_sequentials():
    assert repeated_blocks(network := Blocks()) == list(network.blocks)
    assert repeated_blocks(network := nn.Sequential(*(nn.Sequential(nn.Linear(2, 2)) for _ in range(2)))) == [*network]
    assert repeated_blocks(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))) == []
    layer = nn.TransformerEncoderLayer(8, 2, 8)
    encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    assert repeated_blocks(nn.Sequential(encoder)) == list(encoder.layers)


@pytest.mark.table
@pytest.mark.parametrize(
    "options, message",
    [
        ({"device": "1.25GiB", "x": torch.randn(2**20, 64)}, "nothing fits; a step on 1048576 x 64 takes at least"),
        (  # one value per channel cannot be normalised
            {"grow": "batch", "device": device_for(1000), "x": torch.randn(2, 64), "network": nn.BatchNorm1d(64)},
            "nothing fits; a step on 2 x 64 takes at least",
        ),
        ({"grow": "size"}, "the network does not run on 8 x 128: .* must have same reduction dim"),
        ({"network": Asking(64, 64)}, "asks for values of tensors .*: remove code that reads them"),
        ({"network": Blocks().requires_grad_(False)}, "no output of the network needs a gradient"),
    ],
)
def test_what_is_wrong_is_said(options, message):
    arguments = {"network": Blocks(), "x": X, "device": "2GiB"} | options
    with pytest.raises(ValueError, match=message) as caught:
        fit(arguments.pop("network"), arguments.pop("x"), arguments.pop("device"), **arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"device": "12"}, "memory='12': expected a device's memory, such as '12GiB'"),
        ({"device": "1GiB"}, "of which CUDA takes 0.5GiB and convolutions 0.7GiB"),
        *(({"device": wrong}, "^memory=.*: expected a device") for wrong in (torch.device("cpu"), nan, True)),
        *(({"optimizer": wrong}, "^optimizer=.*: expected one") for wrong in ("lion", torch.optim.Adam, inf, True, -1)),
        ({"time": 1.2}, "time=1.2, grow=None: expected at least 1.0, with grow='batch' or 'size'"),
        *(({"time": wrong, "grow": "batch"}, "^time=.*: expected at") for wrong in ("1.2", nan, True, 0.9)),
        *(({"grow": wrong}, "^grow=.*: expected 'batch', or") for wrong in ("Batch", True, X)),
        ({"grow": "batch", "x": torch.randn(0, 64)}, r"of shape \(0, 64\): expected 'ba"),
        ({"grow": "size", "x": torch.randn(2, 3, 0, 0)}, "and no empty tensor"),
        ({"grow": "size", "x": torch.randn(64)}, r"grow='size' with an example of shape \(64,\): expected 'batch'"),
        ({"grow": "batch", "x": ([X] * 2,)}, "grow='batch' with a list of tensors: expected a batch in"),
        ({"x": (8, 64)}, r"example=\(8, 64\) has no tensor"),
        ({"network": Blocks}, "fit got the class Blocks: expected an object"),
    ],
)
def test_a_wrong_argument_is_named_before_the_network_is_copied(options, message, monkeypatch):
    monkeypatch.setattr(sys.modules[fit.__module__], "on_copy", lambda *_: pytest.fail("it was copied"))
    test_what_is_wrong_is_said(options, message)


MODULE = """
import torch
def example():
    network = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()).bfloat16()
    return network, torch.zeros(2**16, 64, dtype=torch.bfloat16)
def asks():
    return torch.nn.Linear(2, int(torch.ones(1).item())), (torch.zeros(3, 2),)
def asks_by_numpy():
    return torch.nn.Linear(2, int(torch.ones(1).numpy()[0])), (torch.zeros(3, 2),)
def alone():
    return torch.nn.Linear(2, 2)
def fails():
    return 1 / 0
def misfits():
    return torch.nn.Linear(2, 2), torch.zeros(3, 5)
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "my_networks.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("my_networks", None)


@pytest.mark.slow
def test_the_command_prints_what_fits(module, capsys):
    words = ["my_networks:example", "--memory", "2GiB", "--optimizer", "4"]
    run = [sys.executable, "-W", "error:::runpy", "-m", "keepless.fit", *words]
    done = subprocess.run(run, cwd=module, env={"PYTHONPATH": str(REPOSITORY)}, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr
    fitted = command.main(words)
    assert capsys.readouterr().out == done.stdout == f"{fitted}\n"
    assert fitted.states == 4 * 64 * 65 and fitted.weights == 2 * 64 * 65


@pytest.mark.parametrize("wrong", ["--memory 12", "--optimizer=", "--optimizer 2x", "--optimizer nan", "--time 2"])
def test_a_wrong_option_is_named_before_the_function_is_called(wrong):
    with pytest.raises(ValueError, match=f"^{wrong.strip('-').split()[0].strip('=')}="):
        command.main(["nowhere:example", "--memory", "2GiB", *wrong.split()])


@pytest.mark.parametrize("name", ["asks", "asks_by_numpy"])
def test_functions_that_need_values_are_called_without_meta(module, name):
    assert command.main([f"my_networks:{name}", "--memory", "2GiB", "--autocast", "bfloat16"]).weights == 12


@pytest.mark.parametrize(
    "function, message",
    [
        ("nowhere:example", "nowhere:example: No module named 'nowhere'; expected MODULE:FUNCTION"),
        ("my_networks:alone", "my_networks:alone returns Linear: expected a network .* and an example of its input"),
        ("my_networks:fails", r"my_networks:fails raises ZeroDivisionError \(my_networks.py:\d+\): division by zero"),
        ("my_networks:misfits", r"a step of my_networks:misfits's network on its example raises RuntimeError \("),
    ],
)
def test_wrong_functions_are_named(module, function, message):
    with pytest.raises(ValueError, match=message) as caught:
        command.main([function, "--memory", "2GiB"])
    assert "\n" not in str(caught.value)
