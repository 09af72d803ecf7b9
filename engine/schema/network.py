"""Keys of the network: norm, body and head."""

from dataclasses import dataclass

from omegaconf import MISSING

from engine.schema.keys import key
from models.layers.backends import BACKENDS
from models.package import PACKAGE_ACTIVATIONS

SYNC_GROUPS = ("world", "node")


@dataclass
class Norm:
    """Batch normalisation and activation."""

    name: str = MISSING
    activation: str = "leaky_relu"
    activation_param: float = 0.01  # leaky_relu's slope for negative inputs, or elu's alpha
    momentum: float = key(0.1, above=0, most=1)
    eps: float = key(1e-5, above=0)


@dataclass
class OurNorm(Norm):
    """Options of every layer in models.layers."""

    learn_scale: bool = True  # false: gamma is 1
    sync: bool = False  # share statistics between processes
    sync_group: str = key("world", one_of=SYNC_GROUPS)  # all processes, or those on the same machine
    backend: str = key("auto", one_of=BACKENDS)


@dataclass
class StandardNorm(OurNorm):
    name: str = "std"


@dataclass
class CheckpointNorm(OurNorm):
    name: str = "checkpoint"  # keeps x


@dataclass
class CheckpointXHatNorm(OurNorm):
    name: str = "checkpoint_xhat"  # keeps x_hat


@dataclass
class InPlaceNorm(OurNorm):
    name: str = "inplace"  # variant II
    gamma_floor: float = key(1e-5, above=0)  # smallest |gamma| in training


@dataclass
class InPlaceNorm1(InPlaceNorm):
    name: str = "inplace_1"  # variant I


@dataclass
class PackageNorm(Norm):
    name: str = "package"  # the released inplace_abn

    def check(self) -> None:
        if self.activation not in PACKAGE_ACTIVATIONS:
            raise ValueError(
                f"norm.activation={self.activation} with norm=package: the released package has "
                f"{', '.join(PACKAGE_ACTIVATIONS)}; choose one of them, or norm=inplace"
            )


@dataclass
class Body:
    name: str = MISSING
    output_stride: int = key(8, one_of=(8, 16, 32))  # pixels per feature cell


@dataclass
class ResNeXtBody(Body):
    name: str = "resnext"
    structure: list[int] = key([3, 4, 23, 3], above=0)  # blocks per module
    base_channels: list[int] = key([128, 128, 256], above=0)  # of the first module's bottlenecks
    groups: int = key(64, above=0)
    stem_channels: int = key(64, above=0)
    stem: str = "3x3"  # three 3x3 convolutions (as released), or one 7x7


@dataclass
class WiderResNetBody(Body):
    name: str = "wider_resnet"
    structure: list[int] = key([3, 3, 6, 3, 1, 1], above=0)  # blocks in mod2 … mod7
    channels: list[list[int]] = key(MISSING, above=0)  # of each block's convolutions, in mod2 … mod7
    stem_channels: int = key(64, above=0)
    downsampling: str = "stride"  # before mod4, mod5, mod6: stride (the A2 variant, for segmentation) or pool (plain)
    dropout: list[float] = key([0.0, 0.0, 0.0, 0.0, 0.3, 0.5], least=0, most=1)  # in mod2 … mod7


@dataclass
class Head:
    name: str = MISSING


@dataclass
class DeepLabV3Head(Head):
    name: str = "deeplabv3"
    hidden_channels: int = key(256, above=0)
    out_channels: int = key(256, above=0)
    dilations: list[int] = key([12, 24, 36], above=0)
    # Sliding pooling window in evaluation; null: global pooling, as in training.
    pooling_size: list[int] | None = key(None, above=0, entries=("height", "width in feature cells"))


NORMS: dict[str, type[Norm]] = {
    "std": StandardNorm,
    "checkpoint": CheckpointNorm,
    "checkpoint_xhat": CheckpointXHatNorm,
    "inplace_1": InPlaceNorm1,
    "inplace": InPlaceNorm,
    "package": PackageNorm,
}
BODIES: dict[str, type[Body]] = {"resnext": ResNeXtBody, "wider_resnet": WiderResNetBody}
HEADS = {"deeplabv3": DeepLabV3Head}
