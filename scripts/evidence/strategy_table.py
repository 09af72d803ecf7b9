"""The tables of docs/memory.md, which `documents` writes.

They show what each strategy of the paper's Figure 2 keeps and recomputes in a BN + ACT + CONV block, and in whole
networks of the release, checkpointed blocks, and the ranges in which activations can be inverted. Buffers are
recognised by their values among the tensors that autograd keeps, recomputed operations among the operators that the
backward pass calls. The whole networks run on fake tensors, which needs little time and memory.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from keepless import ABN, CheckpointedABN, InPlaceABN, recompute_activations
from keepless.fit.made_tensors import MadeTensors
from keepless.norms.backends.activations import EXACT_RANGES, INVERTIBLE_ACTIVATIONS, Activation, invertible_range
from keepless.saved import kept_bytes, saved_for_backward
from keepless.torch_internals import FakeTensorMode, OpOverload, TorchDispatchMode
from models.bodies import Body, densenet264, resnet101, resnext101, wider_resnet38_a2
from models.heads import DeepLabV3
from models.recomputation import RECOMPUTE, choose_recomputation
from models.segmentation import SegmentationNetwork
from scripts.evidence.measuring import autocast, operations_of
from scripts.reports import markdown


class Cost(NamedTuple):
    """Tensors of a training step, without parameters, in bytes per input pixel; and its operations."""

    kept: int  # after the forward pass
    peak: int  # at any moment, with the gradients of the parameters
    operations: int  # floating-point operations of convolutions


def segmentation_network(
    build: Callable[..., Body], norm_act: Callable[[int], nn.Module], recompute: str = "none"
) -> SegmentationNetwork:
    """A body at output stride 8 with a DeepLabV3 head, for 19 classes."""
    features = build(norm_act, output_stride=8)
    network = SegmentationNetwork(features, DeepLabV3(features.out_channels, norm_act=norm_act), 19)
    choose_recomputation(network, features, recompute)
    return network


def _plain_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Of upsampled logits, as the paper's networks have it."""
    return F.cross_entropy(F.interpolate(logits, labels.shape[1:], mode="bilinear"), labels)


def cost(
    build: Callable[..., Body], norm_act: Callable[[int], nn.Module], recompute: str, crop_size: int = 512
) -> Cost:
    """Cost of a step of a `segmentation_network` in float32, measured on fake tensors."""
    crops = 2
    pixels = crops * crop_size**2

    def loss() -> Tensor:
        images = torch.zeros(crops, 3, crop_size, crop_size)
        labels = torch.zeros(crops, crop_size, crop_size, dtype=torch.long)
        return _plain_loss(network(images), labels)

    with FakeTensorMode():
        network = segmentation_network(build, norm_act, recompute)
        with MadeTensors() as made:
            result = loss()
            kept = made.bytes
            result.backward()
        network.zero_grad()
        operations = operations_of(lambda: loss().backward())  # by itself, because counting keeps tensors
    return Cost(round(kept / pixels), round(made.peak / pixels), operations)


def recomputation_table(build: Callable[..., Body], norms: Mapping[str, Callable[[int], nn.Module]]) -> str:
    """The cost of a body with every norm and choice in Markdown; `norms`: {norm: channels -> norm and activation}."""
    lines = []
    for norm, norm_act in norms.items():
        costs = {recompute: cost(build, norm_act, recompute) for recompute in RECOMPUTE}
        stored = costs["none"]
        for recompute, (kept, peak, operations) in costs.items():
            memory = _relative(kept, stored.kept), _relative(peak, stored.peak)
            lines.append([norm, recompute, *memory, f"{operations / stored.operations:.2f}"])
    titles = ["`norm=`", "`trainer.recompute=`", "kept", "peak", "operations"]
    return markdown.table(titles, lines, left=2)


def _relative(value: int, stored: int) -> str:
    if value == stored:
        return f"{value:,}"
    return f"{value:,} ({stored / value:.2f}x less)" if value < stored else f"{value:,} ({value / stored:.2f}x more)"


# {norm: (letter in Figure 2, title, layer)}
STRATEGIES: dict[str, tuple[str, str, Callable[..., ABN]]] = {
    "std": ("a", "standard", ABN),
    "checkpoint": ("b", "checkpointing", partial(CheckpointedABN, store="x")),
    "checkpoint_xhat": ("c", "checkpointing (proposed)", partial(CheckpointedABN, store="x_hat")),
    "inplace_1": ("d", "in-place ABN I", partial(InPlaceABN, variant="I")),
    "inplace": ("e", "in-place ABN II", InPlaceABN),
}
BODIES: dict[str, Callable[..., Body]] = {
    "ResNeXt-101": resnext101,
    "WideResNet-38": wider_resnet38_a2,
    "DenseNet-264": densenet264,
    "ResNet-101": resnet101,
}
RECOMPUTED_NORMS = {norm: STRATEGIES[norm][2] for norm in ("std", "inplace")}
CHANNELS, SLOPE = 16, 0.01
CROP_SIZE = 512


@dataclass
class Row:
    norm: str
    buffers: list[str]  # a value per pixel: x, x_hat, z
    statistics: list[str]  # a value per channel: mean, sigma
    recomputed: list[str]  # operations in the backward pass that the standard one does not need
    activation_bytes: int  # of the buffers


def measure(norm: str) -> Row:
    """Run BN + ACT + CONV forward and backward once, on the reference backend."""
    torch.manual_seed(0)
    layer = STRATEGIES[norm][2](CHANNELS, activation_param=SLOPE, backend="eager")
    gamma, beta = layer.parameters()
    nn.init.uniform_(gamma, 0.5, 1.5)
    nn.init.uniform_(beta, -0.5, 0.5)
    block = nn.Sequential(layer, nn.Conv2d(CHANNELS, CHANNELS, 1, bias=False))
    recompute_activations(block, checkpointed_only=True)
    x = torch.randn(4, CHANNELS, 8, 8, requires_grad=True) * 2 + 1
    output, saved = saved_for_backward(lambda: block(x), block.parameters())
    names = [_name(tensor, x, layer) for tensor in saved]
    with _Operators(x.shape) as operators:
        output.sum().backward()
    sizes = {name: tensor.untyped_storage().nbytes() for name, tensor in zip(names, saved, strict=True)}
    buffers: list[str] = [name for name in ("x", "x_hat", "z") if name in sizes]
    return Row(
        norm=norm,
        buffers=buffers,
        statistics=[name for name in ("mean", "sigma") if name in sizes],
        recomputed=operators.extra(),
        activation_bytes=sum(sizes[name] for name in buffers),
    )


def table(rows: list[Row]) -> str:
    standard = rows[0].activation_bytes
    shown: markdown.Columns = [
        ("Figure 2", lambda row: STRATEGIES[row.norm][0]),
        ("strategy", lambda row: STRATEGIES[row.norm][1]),
        ("`norm=`", lambda row: row.norm),
        ("keeps", lambda row: ", ".join(row.buffers + row.statistics)),
        (
            "bytes of activations kept",
            lambda row: f"{row.activation_bytes:,} bytes ({row.activation_bytes / standard:.2f})",
        ),
        ("recomputes in the backward pass", lambda row: ", ".join(row.recomputed) or "–"),
    ]
    return markdown.columns(rows, shown, left=len(shown))


def kept_by_segmentation(
    build: Callable[..., Body],
    norm_act: Callable[[int], nn.Module],
    crops: int,
    precision: str = "float32",
    with_images: bool = True,
) -> int:
    """Bytes that the loss of a `segmentation_network` keeps for the backward pass, without parameters."""
    with FakeTensorMode():
        network = segmentation_network(build, norm_act)
        images = torch.empty(crops, 3, CROP_SIZE, CROP_SIZE)
        labels = torch.empty(crops, CROP_SIZE, CROP_SIZE, dtype=torch.long)
        with autocast("cpu", precision):
            left_out = [] if with_images else [images]
            return kept_bytes(network, lambda: _plain_loss(network(images), labels), left_out)


def bytes_per_pixel(norm: str, body: str) -> int:
    """Bytes per input pixel that a whole network keeps for the backward pass in float32, images included."""
    return round(kept_by_segmentation(BODIES[body], STRATEGIES[norm][2], crops=2) / (2 * CROP_SIZE**2))


def network_table(kept: dict[str, dict[str, int]]) -> str:
    """{body: {norm: bytes per pixel}} in Markdown."""
    lines = [
        [title, norm, *(_relative(of_body[norm], of_body["std"]) for of_body in kept.values())]
        for norm, (_, title, _) in STRATEGIES.items()
    ]
    return markdown.table(["strategy", "`norm=`", *kept], lines, left=2 + len(kept))


def range_table() -> str:
    """The range of y that each activation's inverse can return, in Markdown."""
    lines = []
    for name in INVERTIBLE_ACTIVATIONS:
        dtypes = (torch.float32, torch.bfloat16, torch.float16)
        clamped = [invertible_range(Activation(name, 1.0), dtype) for dtype in dtypes]
        lines.append([name, *map(_interval, [EXACT_RANGES[name], *clamped])])
    exact = "float64 gradients exact to 1e-10"
    titles = ["activation", exact, "y after the clamp: float32", "bfloat16", "float16"]
    return markdown.table(titles, lines, left=len(titles))


def _interval(bounds: tuple[float, float]) -> str:
    low, high = bounds
    if math.isinf(low):
        return "everywhere"
    return f"y >= {low:.4g}" if math.isinf(high) else f"{low:.4g} … {high:.4g}"


def _name(saved: Tensor, x: Tensor, layer: ABN) -> str:
    """The paper's name for a kept tensor, recognised by its values."""
    with torch.no_grad():
        var, mean = torch.var_mean(x, (0, 2, 3), correction=0)
        sigma = torch.rsqrt(var + layer.eps)
        x_hat = (x - mean.view(1, -1, 1, 1)) * sigma.view(1, -1, 1, 1)
        gamma, beta = layer.parameters()
        y = x_hat * gamma.view(1, -1, 1, 1) + beta.view(1, -1, 1, 1)
        known = {"x": x, "x_hat": x_hat, "z": nn.functional.leaky_relu(y, SLOPE), "mean": mean, "sigma": sigma}
        known |= {"gamma": gamma, **dict(layer.named_buffers())}
        for name, tensor in known.items():
            if tensor.shape == saved.shape and torch.allclose(tensor, saved, atol=1e-5):
                return name
    raise AssertionError(f"a kept tensor of shape {tuple(saved.shape)} is none of {', '.join(known)}")


class _Operators(TorchDispatchMode):
    """Counts operators whose results have the given shape: in a backward pass, recomputed steps and inverses."""

    def __init__(self, shape: torch.Size):
        super().__init__()
        self.shape = shape
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(
        self,
        function: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        result = function(*args, **(kwargs or {}))
        first = result[0] if isinstance(result, (tuple, list)) else result
        if torch.is_tensor(first) and first.shape == self.shape:
            self.calls[self._paper_name(function, args)] += 1
        return result

    def extra(self) -> list[str]:
        names = ("BN", "pi", "phi", "phi^-1", "pi^-1")
        return [name for name in names if self.calls[name]]

    @staticmethod
    def _paper_name(function: OpOverload, args: tuple[Any, ...]) -> str:
        operator = function.overloadpacket.__name__
        if operator == "native_batch_norm":
            mean, var = args[3], args[4]
            trivial = not mean.any() and bool((var == 1).all())
            return "pi" if trivial else "BN"
        if operator in ("leaky_relu", "leaky_relu_"):
            slope = args[1] if len(args) > 1 else 0.01
            return "phi" if slope < 1 else "phi^-1"
        return "pi^-1" if operator in ("sub", "div") else operator
