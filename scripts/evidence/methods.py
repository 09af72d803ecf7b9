"""Methods to train a network in less memory, and the networks on which they are measured."""

import copy
import difflib
import importlib
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from engine.memory import keep_freed_memory
from engine.schema.keys import key
from keepless import recompute_activations
from keepless.saved import kept_bytes
from keepless.torch_internals import tree_flatten, tree_leaves, tree_unflatten
from scripts.evidence import configured, frame, frozen
from scripts.evidence.measuring import (
    Elsewhere,
    compiled,
    milliseconds,
    peak_bytes,
    replayed,
    timed,
    training_step,
)
from scripts.reports.markdown import section

NETWORKS = (
    *("alexnet", "vgg16_bn", "squeezenet1_1", "googlenet", "inception_v3"),
    *("resnet18", "resnet50", "resnet101", "resnext50_32x4d", "wide_resnet50_2", "densenet121", "densenet169"),
    *("mobilenet_v2", "mobilenet_v3_small", "mobilenet_v3_large", "mnasnet1_0", "shufflenet_v2_x1_0"),
    *("regnet_x_400mf", "regnet_y_400mf", "efficientnet_b0", "efficientnet_v2_s"),
    *("convnext_tiny", "swin_t", "swin_v2_t", "vit_b_16", "maxvit_t"),
    *("fcn_resnet50", "deeplabv3_resnet50", "deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large"),
    *("timm/densenet121", "timm/efficientnet_b0", "timm/mobilenetv4_conv_small", "timm/convnextv2_atto"),
    *("timm/vit_small_patch16_224", "smp/Unet-resnet34", "smp/FPN-resnet50", "smp/DeepLabV3Plus-mobilenet_v2"),
    *(f"transformers/{name}" for name in configured.TRANSFORMERS),
    *(f"diffusers/{name}" for name in configured.DIFFUSERS),
    *(f"nnunet/{name}" for name in configured.NNUNET),
    *(f"frozen/{name}" for name in frozen.NETWORKS),
)
PACKAGES = {
    "": "torchvision",
    "timm": "timm",
    "smp": "segmentation_models_pytorch",
    "transformers": "transformers",
    "diffusers": "diffusers",
    "nnunet": configured.PACKAGE_OF_NNUNET,
    "frozen": "torchvision",
}  # by the part before the slash
OPTIONS: dict[str, dict[str, Any]] = {
    "googlenet": {"init_weights": False},  # the default is slow
    "inception_v3": {"init_weights": False, "aux_logits": False},  # its auxiliary logits need images of 299 pixels
    **{name: {"weights_backbone": None} for name in NETWORKS if name.startswith(("fcn", "deeplabv3", "lraspp"))},
}
SIZED: dict[str, Callable[[int], dict[str, Any]]] = {  # options of networks for images of one size
    "vit_b_16": lambda size: {"image_size": size},
    "maxvit_t": lambda size: {"input_size": (size, size)},
    "timm/vit_small_patch16_224": lambda size: {"img_size": size},
}
# Pixels of the small images on which gradients are compared.
EXACT_DEFAULT = 64
EXACT_SIZE = {"inception_v3": 96, "maxvit_t": 224}  # they take no smaller ones

# The modules that the authors of these networks call blocks, by the names of their classes.
BLOCK_NAMES = frozenset(
    """
    Fire Inception InceptionA InceptionB InceptionC InceptionD InceptionE BasicBlock Bottleneck _DenseLayer
    InvertedResidual _InvertedResidual ResBottleneckBlock MBConv FusedMBConv CNBlock SwinTransformerBlock
    SwinTransformerBlockV2 EncoderBlock MaxVitLayer DenseLayer DepthwiseSeparableConv UniversalInvertedResidual
    ConvNeXtBlock Block UnetDecoderBlock FPNBlock GPT2Block BertLayer LlamaDecoderLayer ViTLayer WhisperEncoderLayer
    WhisperDecoderLayer ResnetBlock2D BasicTransformerBlock StackedConvBlocks
    """.split()
)


def build(name: str, size: int) -> nn.Module:
    """A network of `NETWORKS` for square images of `size` pixels."""
    package, _, own = name.rpartition("/")
    options = OPTIONS.get(name, {}) | SIZED.get(name, lambda size: {})(size)
    if package == "timm":
        return importlib.import_module("timm").create_model(own, pretrained=False, **options)
    if package == "smp":
        architecture, _, encoder = own.partition("-")
        models = importlib.import_module("segmentation_models_pytorch")
        return getattr(models, architecture)(encoder, encoder_weights=None, classes=19, **options)
    if package in ("transformers", "diffusers", "nnunet"):
        return configured.build(PACKAGES[package], own)
    if package == "frozen":
        return frozen.NETWORKS[own]()
    return torchvision.models.get_model(own, weights=None, **options)


def chosen(only: Iterable[str]) -> list[str]:
    """Names of the networks to measure, in the order of `NETWORKS`; all if `only` is empty.

    Raises:
        ValueError: a name is unknown, or its package is not installed.
    """
    names = set(only)
    for name in sorted(names):
        if name not in NETWORKS:
            nearest = ", ".join(difflib.get_close_matches(name, NETWORKS, n=3, cutoff=0))
            known = "scripts/evidence/methods.py lists them all"
            raise ValueError(f"only={name}: there is no such network; the nearest names are {nearest}; {known}")
        if not installed(name):
            raise ValueError(f"only={name}: {package_of(name)} is not installed: pip install '.[networks]'")
    return [name for name in NETWORKS if name in names or not names]


def package_of(name: str) -> str:
    return PACKAGES[name.rpartition("/")[0]]


def installed(name: str) -> bool:
    return importlib.util.find_spec(package_of(name)) is not None


def blocks_of(network: nn.Module) -> list[nn.Module]:
    """The outermost modules that are blocks, in the order of the module tree."""
    if type(network).__name__ in BLOCK_NAMES:
        return [network]
    return [block for child in network.children() for block in blocks_of(child)]


PLAIN, RECOMPUTED, BLOCKS = "plain", "recompute_activations", "checkpoint per block"
ON_CPU, COMPILED, BUDGET = "save_on_cpu", "compiled", "compiled, budget 0.5"
ALL = "all methods"
METHODS = (PLAIN, RECOMPUTED, BLOCKS, ON_CPU, COMPILED, BUDGET)
WITH_COMPILER = ("resnet50", "mobilenet_v2", "efficientnet_b0", "regnet_y_400mf", "convnext_tiny", "vit_b_16")
EXACT_IMAGES = 4  # on which gradients are compared

Forward = Callable[[Tensor], object]  # images -> tensors, maybe in containers


def methods_of(name: str, network: nn.Module, device: str, compiler: str | None) -> list[str]:
    """The methods that apply to a network."""
    applies = {
        BLOCKS: bool(blocks_of(network)),
        ON_CPU: device == "cuda",
        COMPILED: compiler is not None and name in WITH_COMPILER,
        BUDGET: compiler is not None and name in WITH_COMPILER,
    }
    return [method for method in METHODS if applies.get(method, True)]


def forward_of(network: nn.Module, method: str, compiler: str | None = None) -> Forward:
    """A network's forward pass by one of the methods. This may change the network."""
    if method == RECOMPUTED:
        return recompute_activations(network)
    if method == BLOCKS:
        for block in blocks_of(network):
            block.forward = partial(_checkpointed, block.forward)
    elif method == ON_CPU:
        return partial(_saved_on_cpu, network)
    elif method in (COMPILED, BUDGET):
        assert compiler is not None
        return compiled(network, compiler, budget=0.5 if method == BUDGET else 1.0)
    return network


def _checkpointed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A block that keeps its inputs alone. They are passed one by one, so that those in lists are counted as kept."""
    leaves, structure = tree_flatten((args, kwargs))

    def run(*leaves: Any) -> Any:
        args, kwargs = tree_unflatten(leaves, structure)
        return forward(*args, **kwargs)

    return checkpoint(run, *leaves, use_reentrant=False)


def _saved_on_cpu(network: nn.Module, images: Tensor) -> object:
    with save_on_cpu(pin_memory=True):
        return network(images)


IMAGES = {"cpu": 8, "cuda": 128}  # a GPU takes milliseconds for fewer, and Python more
WARM_UP_STEPS = 2  # before a peak is measured: a budget has its plan from the third step on


@dataclass
class NetworksArguments(frame.DeviceArguments):
    """Arguments of benchmarks that measure one network after the other."""

    threads: int = key(1, above=0)  # of PyTorch
    rounds: int = key(5, above=0)  # each measures every network and method once
    images: int | None = key(None, least=2)  # per step; some norms have one value per image; null: see IMAGES
    image_size: int = key(224, above=0)  # pixels
    compiler: str | None = "inductor"  # of torch.compile; null compiles nothing
    only: list[str] = field(default_factory=list)  # networks; empty: all

    @property
    def images_per_step(self) -> int:
        return self.images or IMAGES[self.device]

    def check(self) -> None:
        super().check()
        chosen(self.only)


def page_text(template: str, result: dict, **parts: object) -> str:
    """The page of a record of networks."""
    left_out = [f"- {entry['network']}, {entry['method']}: {entry['reason']}" for entry in result["left_out"]]
    return frame.page_text(
        template,
        result,
        device=frame.DEVICES[result["arguments"]["device"]],
        not_measured=section("Not measured", "\n".join(left_out)) if left_out else "",
        **parts,
    )


# Rows of a network, and what is left out: {"network", "method", "reason"}.
Measured = tuple[list[dict], list[dict]]


def each(
    arguments: NetworksArguments, clock: frame.Clock, every: Sequence[str], measured: Callable[..., Measured]
) -> Iterator[dict]:
    """Measure one network after the other, each in its own process; yield the record so far after each.

    Networks in the record of an earlier call are not measured again, unless even the plain network failed.
    `arguments.only` becomes the networks that are in the record, as if one call had measured all of them.
    `every`: the names of the networks that the benchmark can measure.
    """
    images = arguments.images_per_step
    names = [name for name in chosen(arguments.only) if name in every]
    own = frame.provenance(PACKAGES.values())
    before = frame.begun(replace(arguments, images=images), own)
    rows = before.get("rows", [])
    done = {row["network"] for row in rows}
    left_out = [entry for entry in before.get("left_out", []) if entry["network"] in done]
    commit = before.get("environment", own)["commit"]  # another one counts once it has measured something
    environment = own | {"threads": arguments.threads, "commit": commit}

    def record() -> dict:
        seconds = round(before.get("seconds", 0) + clock.seconds, 1)
        found = {entry["network"] for entry in [*rows, *left_out]}
        arguments.only = [name for name in every if name in found] if found < {*every} else []
        in_order = sorted(rows, key=lambda row: NETWORKS.index(row["network"]))
        return {
            "arguments": {"images": images},
            "environment": environment,
            "seconds": seconds,
            "rows": in_order,
            "left_out": left_out,
        }

    for name in names:
        if name in done:
            continue
        if not installed(name):
            left_out.append({"network": name, "method": ALL, "reason": f"{package_of(name)} is not installed"})
            continue
        try:
            found = alone(measured, name, arguments)
        except Exception as error:  # e.g. out of memory: the other networks can still be measured
            found = [], [{"network": name, "method": ALL, "reason": frame.reason(error)}]
        rows += found[0]
        left_out += found[1]
        environment["commit"] = frame.commits(before, own)
        clock.report(name)
        yield record()
    yield record()


def alone(measured: Callable[..., Measured], name: str, arguments: NetworksArguments) -> Measured:
    """Measure a network in a process of its own, whose memory is free afterwards. `measured`: such as the one below."""
    given = (arguments.device, arguments.images_per_step, arguments.image_size, arguments.rounds, arguments.compiler)
    with Elsewhere(_Measurement, measured, arguments.threads) as process:
        return process.call("measured", name, *given)


class _Measurement:
    """The object in a process that measures networks (see `Elsewhere`)."""

    def __init__(self, measured: Callable[..., Measured], threads: int):
        torch.set_num_threads(threads)
        keep_freed_memory()
        self.measured = measured


def measured(name: str, device: str, images: int, size: int, rounds: int, compiler: str | None) -> Measured:
    """Steps of a network in training mode and float32, on `images` images of `size` pixels.

    Returns:
        A row for each method that works, and the reason for each that fails:
        {"network", "method", "kept_bytes": None if it cannot be counted, "peak_bytes", "times_ms",
        "replay_ms": of a CUDA graph of the step, "deviation", "same_outputs": see `exactness`},
        {"network", "method", "reason"}

    Raises:
        Exception: the plain network fails.
    """
    plain = random_network(name, size)
    pixels = torch.randn(images, 3, size, size, device=device)
    steps: dict[str, Callable[[], object]] = {}

    def start(method: str) -> dict:
        network = copy.deepcopy(plain).to(device)
        forward = forward_of(network, method, compiler)
        step = partial(training_step, network, partial(loss_of, forward, pixels))
        for _ in range(WARM_UP_STEPS):  # gradients exist; compiles
            step()
        kept = None if method == ON_CPU else kept_bytes(network, partial(forward, pixels), [pixels])
        exact = exactness(name, method, device) if method in (RECOMPUTED, BLOCKS) else {}
        peak = peak_bytes(step, device, network)
        steps[method] = step
        return {"kept_bytes": kept, "peak_bytes": peak, **exact}

    rows, left_out = each_method(name, methods_of(name, plain, device, compiler), start)
    times_ms = timed(steps, rounds, device)
    if device == "cuda":
        for method, step in steps.items():
            with suppress(Exception):  # e.g. a step that waits for the device, which no graph can hold
                rows[method]["replay_ms"] = round(milliseconds(replayed(step, device), rounds, device), 5)
    torch.compiler.reset()  # frees compiled code
    return (
        [{"network": name, "method": method, **row, "times_ms": times_ms[method]} for method, row in rows.items()],
        left_out,
    )


def each_method(
    name: str, names: Iterable[str], start: Callable[[str], dict]
) -> tuple[dict[str, dict], list[dict[str, str]]]:
    """Rows that `start` returns by method, and the methods that fail. Raises if the plain network fails."""
    rows: dict[str, dict] = {}
    left_out = []
    for method in names:
        try:
            rows[method] = start(method)
        except Exception as error:  # e.g. out of memory, or of the compiler: the others can still be measured
            if method == PLAIN:  # nothing to compare with
                raise
            left_out.append({"network": name, "method": method, "reason": frame.reason(error)})
    return rows, left_out


def random_network(name: str, size: int) -> nn.Module:
    """A network with random weights. Weights that start from zero would make all gradients before them zero."""
    torch.manual_seed(0)
    network = build(name, size)
    with torch.no_grad():
        for parameter in network.parameters():
            if not parameter.any():
                parameter.normal_(std=0.02)
    return network


def loss_of(forward: Forward, pixels: Tensor) -> Tensor:
    return mean_squares(forward(pixels))


def mean_squares(outputs: object) -> Tensor:
    """A loss for whatever a network returns: the mean squares of its outputs, added."""
    return torch.stack([output.square().mean() for output in tree_leaves(outputs)]).sum()


def exactness(name: str, method: str, device: str) -> dict:
    """Compare a method with the plain network in float64, on small images and with the same random numbers.

    Returns:
        {"deviation": largest deviation of a gradient, relative to the largest gradient,
        "same_outputs": whether the outputs are equal to the bit}
    """
    size = EXACT_SIZE.get(name, EXACT_DEFAULT)
    plain = random_network(name, size).to(device, torch.float64)
    pixels = torch.randn(EXACT_IMAGES, 3, size, size, device=device, dtype=torch.float64)
    network = copy.deepcopy(plain)
    found = []
    for module, forward in ((plain, plain), (network, forward_of(network, method))):
        torch.manual_seed(0)
        outputs = forward(pixels)
        found.append((gradients_of(module, mean_squares(outputs)), tree_leaves(outputs)))
    (gradients, outputs), (own_gradients, own_outputs) = found
    return {
        "deviation": deviation(own_gradients, gradients),
        "same_outputs": all(map(torch.equal, own_outputs, outputs)),
    }


def gradients_of(network: nn.Module, loss: Tensor) -> Tensor:
    """The gradients of all trained parameters, as one vector."""
    parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
    return torch.cat([gradient.flatten() for gradient in torch.autograd.grad(loss, parameters, materialize_grads=True)])


def deviation(gradients: Tensor, reference: Tensor) -> float:
    """The largest, relative to the largest gradient of the reference."""
    return ((gradients - reference).abs().max() / reference.abs().max()).item()
