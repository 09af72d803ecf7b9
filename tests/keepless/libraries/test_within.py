"""Networks of libraries within a budget: planned, equal to the baseline to the bit, and within the budget.

The suite fails a test in which keepless warns, so nothing is said either.
"""

import gc
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from keepless import peak_bytes, recompute_activations
from tests.keepless.libraries import networks
from tests.keepless.libraries.networks import Inputs, Made
from tests.keepless.recompute.ahead import plans

SHARE = 0.7  # of the baseline's peak
LARGER = {"smp FPN": 0.8, "smp Segformer": 0.8}  # the lowest peaks are 0.72 and 0.71
QUICK = {
    "transformers": networks.bert,
    "peft": networks.lora,
    "diffusers": networks.unet,
    "timm": partial(networks.timm, "test_resnet"),
    "segmentation_models_pytorch": partial(networks.smp, "Unet"),
    "lightning": networks.lightning,
    "accelerate": networks.accelerated,
    **{name: getattr(networks, name) for name in ("experts", "emptied_list", "attribute_of_hooks")},
}
OF_TIMM = {  # sides of the images
    **{"convnext_atto": 128, "efficientnet_b0": 64, "mobilenetv4_conv_small": 64, "regnety_002": 64, "test_vit": 160},
    **{"hrnet_w18_small": 160, "mambaout_femto": 64, "test_nfnet": 64, "test_coatnet": 160, "test_maxvit": 160},
    "xcit_nano_12_p8_224": 64,
}
OF_SMP = ["UnetPlusPlus", "MAnet", "Linknet", "FPN", "PSPNet", "PAN", "DeepLabV3Plus", "Segformer"]
SLOW = {
    **{name: getattr(networks, name) for name in "llama qwen mixtral t5 whisper vit segformer upernet mamba".split()},
    "dora": partial(networks.lora, use_dora=True),
    **{name: getattr(networks, name) for name in "ia3 prompt_tuning conditioned_unet dit vae".split()},
    "accelerate in bfloat16": partial(networks.accelerated, mixed_precision="bf16"),
    **{name: partial(networks.timm, name, size) for name, size in OF_TIMM.items()},
    **{f"smp {name}": partial(networks.smp, name) for name in OF_SMP},
}


def new_network(make: Callable[[], Made]) -> Made:
    """A network in training mode, with the same weights in each call."""
    torch.manual_seed(0)
    network, draw = make()
    return network.train(), draw


def loss_of(network: nn.Module, inputs: Inputs) -> Tensor:
    """Libraries return a tensor, a tuple, or a record whose first field is the loss or the result."""
    outputs = network(**inputs) if isinstance(inputs, dict) else network(inputs)
    return (outputs if isinstance(outputs, Tensor) else outputs[0]).float().square().mean()


def step(network: nn.Module, draw: Callable[[], Inputs], seed: int) -> list[Tensor]:
    """Train for a step: its loss, gradients and buffers, and the next random numbers."""
    torch.manual_seed(seed)
    inputs = draw()
    network.zero_grad()
    (loss := loss_of(network, inputs)).backward()
    trained = [parameter for parameter in network.parameters() if parameter.grad is not None]
    torch.optim.SGD(trained, 0.01).step()
    after = [*(parameter.grad for parameter in trained), *network.buffers()]
    return [loss.detach(), *(tensor.clone() for tensor in after), torch.get_rng_state()]


def peak(network: nn.Module, draw: Callable[[], Inputs]) -> int:
    """Bytes at the peak of a step that adds to gradients."""
    torch.manual_seed(9)
    inputs = draw()
    gc.collect()  # the profiler would count it if other memory was freed during the step
    return peak_bytes(lambda: loss_of(network, inputs).backward(), "cpu")


def are_equal(outcomes: list[Tensor], expected: list[Tensor]) -> bool:
    return len(outcomes) == len(expected) and all(map(torch.equal, outcomes, expected))


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_network_trains_within_a_budget_as_without_one(name):
    make = (QUICK | SLOW)[name]
    baseline, draw = new_network(make)
    expected = [step(baseline, draw, seed) for seed in range(3)]
    budget = int(LARGER.get(name, SHARE) * peak(baseline, draw))
    prepared, draw = new_network(make)
    recompute_activations(prepared, budget=budget)
    assert [are_equal(step(prepared, draw, seed), expected[seed]) for seed in range(3)] == [True] * 3
    assert plans(prepared) == [1]
    assert max(peak(prepared, draw) for _ in range(2)) <= 1.01 * budget  # the first of such passes teaches advice


def use(network: nn.Module, adapter: str) -> None:
    network.set_adapter(adapter)


def merge_and_unmerge(network: nn.Module, adapter: str) -> None:
    """As for an evaluation between two steps: the adapter's product is added to the weights, and subtracted again."""
    network.merge_adapter()
    assert network.base_model.model.model.layers[0].self_attn.q_proj.merged
    network.unmerge_adapter()


@pytest.mark.slow
@pytest.mark.parametrize("change", [use, merge_and_unmerge])
def test_adapters_are_switched_and_merged_between_steps(change):
    """Three steps before a change and three after it: adapters have plans of their own, as others are frozen."""
    make = partial(networks.lora, 2)
    baseline, draw = new_network(make)
    expected = []
    for adapter in ("first", "second"):
        change(baseline, adapter)
        expected += [step(baseline, draw, seed) for seed in range(3)]
    budget = int(SHARE * peak(baseline, draw))
    prepared, draw = new_network(make)
    recompute_activations(prepared, budget=budget)
    outcomes = []
    for adapter in ("first", "second"):
        change(prepared, adapter)
        outcomes += [step(prepared, draw, seed) for seed in range(3)]
        assert all(plans(prepared)) and peak(prepared, draw) <= 1.01 * budget
        prepared.zero_grad()
    assert list(map(are_equal, outcomes, expected)) == [True] * 6


@pytest.mark.slow
def test_lora_on_all_convolutions_of_a_resnet_takes_less_than_full_training():
    """Frozen norms need their inputs, and LoRA adds results: the baseline's peak is far above full training's."""
    full, draw = new_network(networks.resnet)
    step(full, draw, 0)
    most = peak(full, draw)
    del full
    baseline, draw = new_network(networks.lora_of_convolutions)
    expected = [step(baseline, draw, seed) for seed in range(3)]
    assert peak(baseline, draw) > 1.5 * most
    del baseline
    budget = int(0.55 * most)
    prepared, draw = new_network(networks.lora_of_convolutions)
    recompute_activations(prepared, budget=budget)
    assert [are_equal(step(prepared, draw, seed), expected[seed]) for seed in range(3)] == [True] * 3
    assert plans(prepared) == [1] and peak(prepared, draw) <= 1.01 * budget
