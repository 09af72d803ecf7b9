"""Checkpointed blocks: gradients, statistics and names stay the same; what a block keeps is counted to the byte."""

from collections.abc import Callable
from functools import partial
from itertools import cycle, product

import pytest
import torch
from torch import nn

from keepless import ABN, InPlaceABN
from keepless.made_tensors import MadeTensors
from keepless.saved import saved_for_backward
from models.bodies import ResNet, ResNeXt, RevNet
from models.bodies.densenet import DenseModule
from models.recomputation import BLOCKS, recompute_blocks, run_blocks
from tests.bodies import SMALL_BODIES
from tests.norms import STRATEGIES


class PlainNorm(nn.BatchNorm2d):
    """PyTorch's own; it does not notice that it runs a second time."""

    activation, activation_param = "identity", 0.0


NORMS = STRATEGIES | {"nn.BatchNorm2d": PlainNorm}
RESIDUAL = partial(RevNet, structure=(1, 2, 1), stem_channels=4, reversible=False)
BODIES = {
    "resnet": SMALL_BODIES["resnet"],
    "resnet-basic": SMALL_BODIES["resnet-cifar"],
    "resnext": SMALL_BODIES["resnext-cifar"],
    "densenet": partial(SMALL_BODIES["densenet"], stem="cifar"),
    "wider": SMALL_BODIES["wider"],
    "wider-a2": SMALL_BODIES["wider-a2"],  # with dropout
    "preact": partial(RESIDUAL, channels=((4, 4), (8, 8), (16, 16))),
    "preact-bottleneck": partial(RESIDUAL, channels=((4, 4, 16), (8, 8, 16), (8, 8, 32))),
}
FORGETTING = BLOCKS[1:]
every_choice = pytest.mark.parametrize("recompute", FORGETTING)


def built(name: str, norm: str, recompute: str, **options) -> nn.Module:
    torch.manual_seed(0)
    network = BODIES[name](NORMS[norm], **options)
    recompute_blocks(network, recompute)
    return network


def compiled_forward(network: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    torch._dynamo.reset()
    return torch.compile(network, backend="aot_eager", fullgraph=True)


def step(name: str, norm: str, recompute: str, compiled: bool = False) -> dict[str, torch.Tensor]:
    """Logits, gradients and running statistics after two micro-batches in float64."""
    network = built(name, norm, recompute, classes=5).double()
    for module in network.modules():
        if isinstance(module, (ABN, PlainNorm)):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.bias, -0.5, 0.5)
    forward, results = compiled_forward(network) if compiled else network, {}
    for part, images in enumerate(torch.randn(2, 2, 3, 16, 16, dtype=torch.float64)):
        logits = forward(images)
        (logits * torch.randn_like(logits)).sum().backward()
        results[f"logits {part}"] = logits.detach()
    gradients = {f"gradient of {key}": parameter.grad for key, parameter in network.named_parameters()}
    return results | gradients | dict(network.named_buffers())


def assert_equal_steps(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for key, values in expected.items():
        scale = max(1, values.abs().max().item())
        torch.testing.assert_close(actual[key], values, rtol=0, atol=1e-10 * scale, msg=key)


@pytest.mark.table
@pytest.mark.parametrize(
    "name, norm", [*product(BODIES, ["inplace"]), *zip(BODIES, cycle(norm for norm in NORMS if norm != "inplace"))]
)
def test_gradients_equal_stored_activations_and_statistics_move_once(name, norm):
    """Every body with the norm that writes over its input, and with another; nothing else depends on both."""
    expected = step(name, norm, "none")
    for recompute in FORGETTING:
        assert_equal_steps(step(name, norm, recompute), expected)


@pytest.mark.slow
@every_choice
@pytest.mark.parametrize("name, norm", list(zip(BODIES, cycle(["std", "inplace", "nn.BatchNorm2d"]))))
def test_compiled_as_one_graph_gradients_equal_stored_activations(name, norm, recompute):
    assert_equal_steps(step(name, norm, recompute, compiled=True), step(name, norm, "none"))


@every_choice
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_gradients_are_the_same_to_the_bit(dtype, recompute):
    def gradients(recompute: str) -> list[torch.Tensor]:
        network = built("wider-a2", "inplace", recompute, classes=5)
        with torch.autocast("cpu", dtype):
            logits = network(torch.randn(3, 3, 32, 32))
        assert logits.dtype == dtype
        logits.float().sum().backward()
        return [parameter.grad for parameter in network.parameters()]

    assert all(map(torch.equal, gradients(recompute), gradients("none")))


OTHER_STEPS = [("resnext", "std", ["mod1", "mod2"], 1), ("resnext", "nn.BatchNorm2d", ["mod1", "mod2"], 1)]
OTHER_STEPS += [("preact", "nn.BatchNorm2d", [], 2)]


@pytest.mark.parametrize("name, norm, frozen, passes", OTHER_STEPS)
def test_frozen_parts_and_two_backward_passes_that_move_the_statistics_once(name, norm, frozen, passes):
    def step(recompute: str) -> list[torch.Tensor | None]:
        network = built(name, norm, recompute, classes=5).double().train(not frozen)
        for part in frozen:
            network.get_submodule(part).requires_grad_(False)
        loss = network(torch.randn(2, 3, 32, 32, dtype=torch.float64)).sum()
        for left in reversed(range(passes)):
            loss.backward(retain_graph=left > 0)
        return [parameter.grad for parameter in network.parameters()] + list(network.buffers())

    expected = step("none")
    assert any(values is None for values in expected) == bool(frozen)
    for recompute in FORGETTING:
        torch.testing.assert_close(step(recompute), expected, rtol=0, atol=1e-10)


PIXELS = 2 * 16 * 16  # of the first stage below
STAGES = dict(stem="cifar", stem_channels=16)
FIRST_STAGE = {
    "resnext": partial(ResNeXt, groups=2, base_channels=(8, 8, 16), **STAGES),
    "resnet": partial(ResNet, base_channels=(4, 4, 16), **STAGES),
    "preact": partial(RevNet, channels=((16, 16), (16, 16), (16, 16)), reversible=False, **STAGES),
}


def kept_values(name: str, norm: str, recompute: str, blocks: int) -> int:
    """Values that the forward pass of a network with so many blocks leaves behind in a stage of PIXELS, and others."""
    network = FIRST_STAGE[name](NORMS[norm], structure=(blocks - 2, 1, 1))
    recompute_blocks(network, recompute)
    images = torch.randn(2, 3, 16, 16)
    with MadeTensors() as made_tensors:
        features = network(images)
    assert features.requires_grad
    return made_tensors.bytes // 4


@pytest.mark.parametrize("name, norm", list(zip(cycle(FIRST_STAGE), NORMS, strict=False)))
def test_one_more_block_keeps_its_input_whatever_the_norm(name, norm):
    assert kept_values(name, norm, "blocks", 5) - kept_values(name, norm, "blocks", 4) == 16 * PIXELS


@pytest.mark.parametrize("norm", NORMS)
def test_a_dense_layer_keeps_its_output(norm):
    """It keeps no concatenation, so bytes grow in proportion to the layers."""
    for recompute in ("blocks", "sqrt"):
        module = DenseModule(8, 9, growth=4, norm_act=NORMS[norm])
        with MadeTensors() as made_tensors:
            (outputs,) = run_blocks(module.layers(), torch.randn(2, 8, 16, 16), recompute)
        assert made_tensors.bytes // 4 == (8 + 9 * 4) * PIXELS and len(outputs) == 1 + 9, recompute


@pytest.mark.parametrize("name, norm", [("resnext", "std"), ("resnet", "inplace"), ("preact", "nn.BatchNorm2d")])
def test_with_sqrt_n_squared_blocks_keep_n_inputs(name, norm):
    kept = [kept_values(name, norm, "sqrt", blocks) for blocks in (4, 9, 16)]
    assert [longer - shorter for shorter, longer in zip(kept, kept[1:], strict=False)] == [16 * PIXELS] * 2


@pytest.mark.slow
def test_a_compiled_block_keeps_its_input():
    def kept(blocks: int) -> int:
        network = FIRST_STAGE["preact"](ABN, structure=(blocks - 2, 1, 1))
        recompute_blocks(network, "blocks")
        forward = compiled_forward(network)
        _, saved = saved_for_backward(lambda: forward(torch.randn(2, 3, 16, 16)))
        return sum(tensor.numel() for tensor in saved if tensor.shape == (2, 16, 16, 16))

    assert kept(5) - kept(4) == 16 * PIXELS


@every_choice
def test_without_gradients_nothing_is_kept_and_nothing_changes(recompute):
    network = built("resnext", "nn.BatchNorm2d", recompute)
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad(), MadeTensors() as made_tensors:
        features = network.eval()(images)
    assert made_tensors.bytes == features.nbytes and not features.requires_grad
    recompute_blocks(network, "none")
    assert torch.equal(network(images), features)


def test_mistakes_are_named():
    body = RevNet(InPlaceABN, structure=(1, 1, 1), channels=((4, 4),) * 3, stem_channels=4)
    with pytest.raises(ValueError, match="recompute='blocks' for a reversible RevNet: it keeps no activations"):
        recompute_blocks(body, "blocks")
    recompute_blocks(body, "none")
    with pytest.raises(ValueError, match="recompute='all': expected one of none, blocks, sqrt"):
        recompute_blocks(body, "all")
