"""Keys of the network: norm, body and head."""

from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeVar

from omegaconf import MISSING

from engine.schema.keys import choice, key
from keepless.norms import BACKENDS, Activation, check_activation
from models.bodies.stem import STEM_STRIDES
from models.checkpoints.published import HALF, IMAGENET, OF_TENSORFLOW, Normalisation, timm_normalisation
from models.freezing import FROZEN_NORMS
from models.released_norm import RELEASED_ACTIVATIONS

MOST_BLOCKS = 1_000
MOST_CHANNELS = 65_536
MOMENTUM = 0.1  # of norms
AnyNorm = TypeVar("AnyNorm", bound="Norm")


@dataclass
class Norm:
    """Batch normalisation and activation."""

    name: str = MISSING
    # leaky_relu, elu, identity, sigmoid or tanh; relu only with norms that keep x. null: relu with weights that were
    # trained with it (body=torchvision, body=timm, init.format=torchvision), else leaky_relu.
    activation: str | None = None

    called_with: ClassVar[tuple[str, ...]] = ("channels", "activation", "momentum")
    in_library_bodies: ClassVar[bool] = False  # whether it can take the place of norms of torchvision and timm
    inverts_activation: ClassVar[bool] = False  # in the backward pass, so that the activation cannot be relu
    # Why it cannot be captured in a CUDA graph, be compiled, or compute in 16 bits; empty if it can.
    not_captured: ClassVar[str] = ""
    not_compiled: ClassVar[str] = ""
    only_float32: ClassVar[str] = ""
    to_share: ClassVar[str] = "norm=inplace norm.sync=true"  # keys by which processes share statistics
    sync = False  # whether they do; a key of norms that can
    momentum = MOMENTUM  # a key of norms that have running statistics
    backend = "eager"  # a key of ours

    def compiles(self, device_type: str) -> bool:
        """Whether it may compile code for its first inputs. (On CUDA Triton's kernels take a second.)"""
        return self.backend == "compiled" or (self.backend == "auto" and device_type == "cpu")

    def eager(self) -> "Norm":
        """The same norm, in a form that compiles nothing."""
        return self if self.backend == "eager" else self.as_kind(type(self), backend="eager")

    def fused(self) -> "Norm":
        """The same norm, as it runs on CUDA: for a plan, made on a CPU, of how much it keeps there."""
        return self.as_kind(type(self), backend="compiled") if self.backend == "auto" else self

    def as_kind(self, kind: type[AnyNorm], **changes: Any) -> AnyNorm:
        """The norm of another kind with the same options, as far as that has them, and `changes`."""
        options = {entry.name for entry in fields(kind)} - {"name"}
        return kind(**{name: value for name, value in vars(self).items() if name in options} | changes)


@dataclass
class BatchNorm(Norm):
    # Weight of the newest minibatch in the running statistics; null: what the network's library gives each norm of a
    # body=torchvision or body=timm, else 0.1.
    momentum: float | None = key(None, above=0, most=1, is_argument=False)  # type: ignore[assignment]  # null: not given
    activation_param: float = 0.01  # leaky_relu's slope for negative inputs, or elu's alpha
    eps: float = key(1e-5, above=0)  # added to the variance


@dataclass
class OurNorm(BatchNorm):
    """Options of every layer in keepless."""

    learn_scale: bool = True  # false: gamma is 1
    sync: bool = False  # share statistics between processes
    backend: str = key("auto", one_of=BACKENDS)  # auto: Triton on CUDA, compiled on a CPU

    to_share: ClassVar[str] = "norm.sync=true"

    def check(self) -> None:
        try:
            activation = Activation(self.activation or "leaky_relu", self.activation_param)
            check_activation(activation, self.inverts_activation)
        except ValueError as error:
            raise ValueError(str(error).replace("activation", "norm.activation")) from None


@choice("norm")
class StandardNorm(OurNorm):
    name: str = "std"
    in_library_bodies: ClassVar[bool] = True
    builds: ClassVar[str] = "keepless.ABN"

    def fused(self) -> Norm:  # two of PyTorch's operators, unless it is synchronised
        return super().fused() if self.sync else self


@choice("norm")
class CheckpointNorm(OurNorm):
    name: str = "checkpoint"  # keeps x
    builds: ClassVar[str] = "keepless.CheckpointedABN"

    def more(self) -> dict[str, Any]:
        return {"store": "x"}


@choice("norm")
class CheckpointXHatNorm(OurNorm):
    name: str = "checkpoint_xhat"  # keeps x_hat
    builds: ClassVar[str] = "keepless.CheckpointedABN"

    def more(self) -> dict[str, Any]:
        return {"store": "x_hat"}


@dataclass
class AnyInPlaceNorm(OurNorm):
    gamma_floor: float = key(1e-5, above=0)  # smallest |gamma| in training

    in_library_bodies: ClassVar[bool] = True
    inverts_activation: ClassVar[bool] = True
    builds: ClassVar[str] = "keepless.InPlaceABN"


@choice("norm")
class InPlaceNorm1(AnyInPlaceNorm):
    name: str = "inplace_1"  # variant I

    def more(self) -> dict[str, Any]:
        return {"variant": "I"}


@choice("norm")
class InPlaceNorm(AnyInPlaceNorm):
    name: str = "inplace"  # variant II


@choice("norm")
class ReleasedNorm(BatchNorm):
    name: str = "package"  # the released inplace_abn

    inverts_activation: ClassVar[bool] = True
    not_captured: ClassVar[str] = "norm=package, the released layer, has not been tried in a CUDA graph"
    not_compiled: ClassVar[str] = "the released layer cannot be compiled"
    only_float32: ClassVar[str] = "the released package computes in float32 only"
    builds: ClassVar[str] = "models.released_norm.released_norm"

    def check(self) -> None:
        if self.activation is not None and self.activation not in RELEASED_ACTIVATIONS:
            raise ValueError(
                f"norm.activation={self.activation} with norm=package: the released package has "
                f"{', '.join(RELEASED_ACTIVATIONS)}; choose one of them, or norm=inplace"
            )


@dataclass
class Body:
    name: str = MISSING
    output_stride: int = key(8, one_of=(8, 16, 32))  # pixels per feature cell
    # Train head and classifier alone: the body's weights keep their initial values, its norms use their running
    # statistics and keep them, and it needs no memory for the backward pass.
    frozen: bool = False
    # Of the body's norms, keep the initial running statistics, or all: scale and shift too; the rest is trained. For
    # crops that are too few for statistics of their own.
    frozen_norms: str = key("none", one_of=FROZEN_NORMS)

    called_with: ClassVar[tuple[str, ...]] = ("norm_act", "classes", "output_stride")
    in_library: ClassVar[bool] = False  # it is a network of torchvision or timm, or works like one

    def check(self) -> None:
        if self.frozen and self.frozen_norms != "none":
            raise ValueError(
                f"body.frozen_norms={self.frozen_norms} with body.frozen=true, which freezes norms too: leave one out"
            )

    def normalisation(self) -> Normalisation:
        """The normalisation of the images on which its published weights were trained."""
        return IMAGENET

    def is_reversible(self) -> bool:
        """Whether the body can restore its activations in the backward pass."""
        return False


@dataclass
class StemmedBody(Body):
    """A stem (mod1), then four stages (mod2 … mod5), or three with the CIFAR stem."""

    output_stride: int = key(8, one_of=(2, 4, 8, 16, 32))  # at most this many pixels per feature cell
    structure: list[int] = key(MISSING, above=0, most=MOST_BLOCKS)  # blocks or layers per stage
    stem_channels: int = key(64, above=0, most=MOST_CHANNELS)  # channels after the stem
    stem: str = key(MISSING, one_of=tuple(STEM_STRIDES))  # three 3x3 convolutions, one 7x7, or cifar: one of stride 1

    def check(self) -> None:
        super().check()
        if self.stem != "cifar" and self.output_stride < 8:
            raise ValueError(
                f"body.output_stride={self.output_stride}: expected one of 8, 16, 32 with body.stem={self.stem}; 2 and "
                f"4 need body.stem=cifar"
            )


@choice("body", is_base=True)
class ResNetBody(StemmedBody):
    name: str = "resnet"
    builds: ClassVar[str] = "models.bodies.ResNet"
    structure: list[int] = key([3, 4, 6, 3], above=0, most=MOST_BLOCKS)
    # Channels of each convolution in the first stage's blocks: two for basic blocks, three for bottlenecks.
    base_channels: list[int] = key([64, 64, 256], above=0, most=MOST_CHANNELS)
    groups: int = key(1, above=0, most=MOST_CHANNELS)  # of each bottleneck's 3x3 convolution
    stem: str = key("7x7", one_of=tuple(STEM_STRIDES))


@choice("body", is_base=True)
class ResNeXtBody(StemmedBody):
    name: str = "resnext"
    builds: ClassVar[str] = "models.bodies.ResNeXt"
    structure: list[int] = key([3, 4, 23, 3], above=0, most=MOST_BLOCKS)
    base_channels: list[int] = key([128, 128, 256], above=0, most=MOST_CHANNELS)  # of each convolution in stage 1
    groups: int = key(64, above=0, most=MOST_CHANNELS)  # of each bottleneck's 3x3 convolution
    stem: str = key("3x3", one_of=tuple(STEM_STRIDES))


@choice("body", is_base=True)
class DenseNetBody(StemmedBody):
    name: str = "densenet"
    builds: ClassVar[str] = "models.bodies.DenseNet"
    structure: list[int] = key([6, 12, 64, 48], above=0, most=MOST_BLOCKS)
    growth: int = key(32, above=0, most=MOST_CHANNELS)  # channels that each layer adds
    stem: str = key("3x3", one_of=tuple(STEM_STRIDES))
    stem_norm: bool = False  # a norm after the stem's last convolution, as in DenseNet's paper


@choice("body", is_base=True)
class RevNetBody(StemmedBody):
    name: str = "revnet"
    builds: ClassVar[str] = "models.bodies.RevNet"
    # Per stage, channels of each convolution in a residual unit: two (3x3, 3x3) or three (bottleneck: 1x1, 3x3, 1x1).
    channels: list[list[int]] = key(MISSING, above=0, most=MOST_CHANNELS)
    stem_channels: int = key(MISSING, above=0, most=MOST_CHANNELS)  # channels after the stem
    stem: str = key("cifar", one_of=tuple(STEM_STRIDES))
    reversible: bool = True  # false: a pre-activation ResNet
    keep_activations: bool = False  # for a reversible body: compute the same from stored activations

    def is_reversible(self) -> bool:
        return self.reversible

    def check(self) -> None:
        super().check()
        if self.keep_activations and not self.reversible:
            raise ValueError(
                "body.keep_activations=true with body.reversible=false: a ResNet keeps its activations anyway; leave "
                "keep_activations out"
            )


@choice("body", is_base=True)
class WiderResNetBody(Body):
    name: str = "wider_resnet"
    builds: ClassVar[str] = "models.bodies.WiderResNet"
    structure: list[int] = key([3, 3, 6, 3, 1, 1], above=0, most=MOST_BLOCKS)  # blocks in mod2 … mod7
    # Channels of each convolution in a block, for mod2 … mod7.
    channels: list[list[int]] = key(MISSING, above=0, most=MOST_CHANNELS)
    stem_channels: int = key(64, above=0, most=MOST_CHANNELS)  # channels after the stem
    downsampling: str = "stride"  # before mod4, mod5, mod6: stride (the A2 variant, for segmentation) or pool (plain)
    dropout: list[float] = key([0.0, 0.0, 0.0, 0.0, 0.3, 0.5], least=0, most=1)  # in mod2 … mod7


@choice("body")
class TorchvisionBody(Body):
    name: str = "torchvision"
    network: str = MISSING  # its name there, such as resnet50, regnet_y_400mf or convnext_tiny
    last: str | None = None  # the last part that is used, such as layer3, features.13 or blocks.4; null: all
    # A file of its weights, or published: the library's own, downloaded. Short for init.weights and init.format.
    weights: str | None = key(None, is_argument=False)

    in_library: ClassVar[bool] = True
    builds: ClassVar[str] = "models.bodies.torchvision_body"

    def more(self) -> dict[str, Any]:
        return {"instead": "norm=std trainer.recompute=activations keeps less"}

    def normalisation(self) -> Normalisation:
        return HALF if self.network in OF_TENSORFLOW else IMAGENET


@choice("body")
class TimmBody(TorchvisionBody):
    name: str = "timm"  # its network may be NAME.TAG, as timm and the Hub name weights
    builds: ClassVar[str] = "models.bodies.timm_body"

    def normalisation(self) -> Normalisation:
        return timm_normalisation(self.network)


@dataclass
class Head:
    name: str = MISSING
    # Of the loss of an auxiliary FCN head on the body's last features but one, usually 0.4; 0: none. It trains with the
    # network, and evaluations leave it out.
    auxiliary_weight: float = key(0.0, least=0)

    called_with: ClassVar[tuple[str, ...]] = ("in_channels", "norm_act")
    fewest_at_a_time: ClassVar[tuple[int, str]] = (1, "every micro-batch needs an image")  # images that it needs; why


@choice("head")
class DeepLabV3Head(Head):
    name: str = "deeplabv3"
    hidden_channels: int = key(256, above=0, most=MOST_CHANNELS)  # of each branch
    out_channels: int = key(256, above=0, most=MOST_CHANNELS)  # features for the classifier
    dilations: list[int] = key([12, 24, 36], above=0)  # of the 3x3 branches, in feature cells
    # Sliding pooling window in evaluation; null: global pooling, as in training.
    pooling_size: list[int] | None = key(None, above=0, entries=("height", "width in feature cells"))

    fewest_at_a_time: ClassVar[tuple[int, str]] = (
        2,
        "the pooled branch of the head cannot normalise a single value per channel",
    )
    builds: ClassVar[str] = "models.heads.DeepLabV3"
