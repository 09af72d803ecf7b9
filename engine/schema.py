"""Every key that a segmentation run or an evaluation may be given, with its type, default and bounds.

A group with alternatives (norm, body, …) has one dataclass per alternative, found by its `name`, so that an option
which an alternative does not have is an error and not silently ignored.
"""

from copy import deepcopy
from dataclasses import dataclass, field

from omegaconf import MISSING

from datasets.coco_stuff import LISTS
from models.layers.backends import BACKENDS

DATASETS = ("camvid", "cityscapes", "coco_stuff", "synthetic", "vistas")
DEVICES = ("auto", "cpu", "cuda")
PRECISIONS = ("float32", "bfloat16", "float16")
SYNC_GROUPS = ("world", "node")
ON_ERROR = ("stop", "skip")
INIT_FORMATS = ("standard_bn",)


def key(
    default,
    *,
    above: float | None = None,
    least: float | None = None,
    most: float | None = None,
    one_of: tuple | None = None,
):
    """A key with a default and bounds, which hold for every number of a list; None (null) is always allowed."""
    bounds = {"above": above, "least": least, "most": most, "one_of": one_of}
    return field(default_factory=lambda: deepcopy(default), metadata=bounds)


@dataclass
class Norm:
    """Batch normalisation and activation."""

    name: str = MISSING
    activation: str = "leaky_relu"
    activation_param: float = 0.01  # slope of leaky_relu for negative inputs, alpha of elu
    momentum: float = key(0.1, above=0, most=1)
    eps: float = key(1e-5, above=0)


@dataclass
class OurNorm(Norm):
    """What all layers of models.layers have."""

    learn_scale: bool = True  # false: gamma is 1
    sync: bool = False  # statistics of the minibatches of several processes together
    sync_group: str = key("world", one_of=SYNC_GROUPS)  # of all of them, or of those on the same machine
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


@dataclass
class Body:
    name: str = MISSING
    output_stride: int = key(8, one_of=(8, 16, 32))  # pixels per feature cell


@dataclass
class ResNeXtBody(Body):
    name: str = "resnext"
    structure: list[int] = key([3, 4, 23, 3], above=0)  # blocks per module
    base_channels: list[int] = key([128, 128, 256], above=0)  # of the first module's bottleneck
    groups: int = key(64, above=0)
    stem_channels: int = key(64, above=0)
    stem: str = "3x3"  # three 3x3 convolutions (the released networks), or one 7x7


@dataclass
class WiderResNetBody(Body):
    name: str = "wider_resnet"
    structure: list[int] = key([3, 3, 6, 3, 1, 1], above=0)  # blocks in mod2 … mod7
    channels: list[list[int]] = key(MISSING, above=0)  # of the convolutions of a block, in mod2 … mod7
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
    # Sliding pooling window at test time, (height, width) in feature cells.
    pooling_size: list[int] | None = key(None, above=0)


@dataclass
class ColourJitter:
    """Random changes of a crop's colours, none by default as in the paper's recipe."""

    brightness: float = key(0.0, least=0)  # s: a factor between max(0, 1 - s) and 1 + s
    contrast: float = key(0.0, least=0)
    saturation: float = key(0.0, least=0)
    hue: float = key(0.0, least=0, most=0.5)  # a shift of at most so many turns of the colour circle, either way


@dataclass
class Data:
    name: str = key(MISSING, one_of=DATASETS)
    root: str | None = None  # the dataset's folder; synthetic writes one into the cache folder where it is null
    train_split: str = "train"
    val_split: str = "val"
    # Pixels of the longest side at scale 1, in training and in evaluation; null: the image's own size. IoU is counted
    # at the label's own size.
    base_size: int | None = key(None, above=0)
    crop_size: int = key(MISSING, above=0)  # pixels, square
    # The paper's number: global, before it is divided over processes and accumulation steps.
    crops_per_minibatch: int = key(MISSING, above=0)
    scale: list[float] = key([0.7, 2.0], above=0)
    flip: float = key(0.5, least=0, most=1)
    colour_jitter: ColourJitter = field(default_factory=ColourJitter)
    mean: list[float] = key([0.485, 0.456, 0.406], least=0, most=1)  # RGB in 0-1, as is std
    std: list[float] = key([0.229, 0.224, 0.225], above=0, most=1)
    workers: int = key(2, least=0)  # processes that read and augment
    verify: bool = True  # check every file before the first step; remembered until the files change
    # What an image that cannot be read does to the training: stop it, or skip to the next image, at most max_skipped
    # times in a run.
    on_error: str = key("stop", one_of=ON_ERROR)
    max_skipped: int = key(100, least=0)
    timeout_seconds: int = key(300, above=0)  # a minibatch that the workers do not bring in this time stops the run


@dataclass
class CocoStuffData(Data):
    lists: str = key("challenge", one_of=LISTS)  # the 40k / 5k images of the 2017 challenge, or all 118k / 5k
    other_class: bool = False  # things are a 92nd class "other"; false: they are ignored


@dataclass
class Sampler:
    """Which image, and which part of it, each training crop is taken from."""

    name: str = MISSING


@dataclass
class UniformSampler(Sampler):
    name: str = "uniform"  # every image once per epoch


@dataclass
class ClassUniformSampler(Sampler):
    name: str = "class_uniform"
    fraction: float = key(1.0, above=0, most=1)  # of an epoch's crops drawn by class, the rest by image
    folder: str | None = None  # where the class index is kept; null: in the cache folder
    positions: int = key(32, above=0)  # pixels that the index remembers per image and class


@dataclass
class Loss:
    name: str = MISSING


@dataclass
class CrossEntropyLoss(Loss):
    name: str = "cross_entropy"


@dataclass
class BootstrappedLoss(Loss):
    name: str = "bootstrapped"
    fraction: float = key(0.25, above=0, most=1)  # share of a crop's pixels that counts: the paper's m


@dataclass
class Optim:
    """SGD with the poly schedule."""

    lr: float = key(MISSING, above=0)  # at the first step
    momentum: float = key(0.9, least=0, most=1)
    weight_decay: float = key(1e-4, least=0)
    nesterov: bool = False
    power: float = key(0.9, least=0)  # of the poly schedule (1 - step / steps)^power
    max_gradient_norm: float | None = key(None, above=0)  # longer gradients are scaled down to it; null: never
    fused: bool = True  # one pass over each parameter


@dataclass
class Trainer:
    # Durations are given in epochs or steps; where both are given, the shorter one counts.
    epochs: int | None = key(None, above=0)
    steps: int | None = key(None, above=0)
    evaluate_every_epochs: int | None = key(None, above=0)  # the end of the run is always evaluated
    evaluate_every_steps: int | None = key(None, above=0)
    evaluate_images: int | None = key(None, above=0)  # evaluate on the first so many only, also at the end; null: all
    checkpoint_every_steps: int = key(500, above=0)
    log_every_steps: int = key(20, above=0)
    pictures: int = key(4, least=0)  # validation images shown in TensorBoard
    device: str = key("auto", one_of=DEVICES)
    precision: str = key("float32", one_of=PRECISIONS)  # bfloat16, float16: by autocast; float16 scales the loss
    tf32: bool = False  # float32 products of 10-bit mantissas on CUDA devices
    channels_last: bool = True
    compile: bool = False  # the training's forward and backward pass as one graph of torch.compile
    deterministic: bool = False  # deterministic algorithms only: two runs give equal weights
    accumulation_steps: int = key(1, above=0)  # parts in which a process's share of a minibatch passes the network
    # Decay of the exponential moving average of the weights, per step, which then is what is evaluated; null: none.
    ema_decay: float | None = key(None, above=0, most=1)
    # Minibatches from which the average's norms take statistics before an evaluation; 0: those of the trained network.
    ema_statistics_minibatches: int = key(0, least=0)
    profile: int = key(0, least=0)  # steps that are profiled, after ten of warming up, to RUN_DIR/profile
    timeout_seconds: int = key(1800, above=0)  # a process that waits longer for another one stops


@dataclass
class Init:
    """What the weights are at step 0; random ones where no file is given."""

    weights: str | None = None  # a checkpoint of this project, or a file of the format below
    # Of a file that is not ours; standard_bn: a state dict with standard batch normalisation under our names.
    format: str | None = key(None, one_of=INIT_FORMATS)
    part: str = key("network", one_of=("network", "body"))  # body: head and classifier start anew


@dataclass
class SegmentationRun:
    """Everything that defines one run of train_seg.py."""

    run_dir: str | None = None  # null: runs/DATASET-NORM/DATE
    resume: str | None = None  # auto: continue the run in run_dir where there is one, else start it
    seed: int = key(0, least=0)
    init: Init = field(default_factory=Init)
    norm: Norm = MISSING
    body: Body = MISSING
    head: Head = MISSING
    loss: Loss = MISSING
    sampler: Sampler = MISSING
    data: Data = MISSING
    optim: Optim = field(default_factory=Optim)
    trainer: Trainer = field(default_factory=Trainer)


@dataclass
class TrainedData:
    base_size: int | None = key(None, above=0)  # null: as in training


@dataclass
class EvaluationData(TrainedData):
    root: str | None = None  # null: where the network was trained
    split: str | None = None  # null: the validation split of the training


@dataclass
class TrainedHead:
    pooling_size: list[int] | None = key(None, above=0)  # null: as in training


@dataclass
class Window:
    """Images larger than this are seen in overlapping squares, for a memory that does not grow with the image."""

    size: int | None = key(None, above=0)  # pixels of a side, a multiple of body.output_stride; null: whole images
    overlap: float = key(0.25, least=0, most=0.9)  # least share of a side that neighbours have in common


@dataclass
class TestTimeAugmentation:
    """Views of every image whose softmax is averaged."""

    scales: list[float] = key([1.0], above=0)  # 1 is data.base_size
    flip: bool = False  # each scale also mirrored left to right


@dataclass
class TrainedNetwork:
    """A checkpoint and how it is to predict; what is not named is as in the checkpoint."""

    checkpoint: str = MISSING
    averaged: bool = True  # the averaged weights, where the checkpoint has them
    head: TrainedHead = field(default_factory=TrainedHead)
    window: Window = field(default_factory=Window)
    tta: TestTimeAugmentation = field(default_factory=TestTimeAugmentation)
    device: str = key("auto", one_of=DEVICES)
    precision: str | None = key(None, one_of=PRECISIONS)  # null: as in training


@dataclass
class Evaluation(TrainedNetwork):
    """Everything that defines one run of eval.py."""

    data: EvaluationData = field(default_factory=EvaluationData)
    predictions: str | None = None  # folder for predictions in the dataset's official encoding
    overlays: str | None = None  # folder for pictures: image | ground truth | prediction
    overlay_images: int | None = key(None, above=0)  # how many of them; null: all
    results: str | None = None  # JSON file; null: in the run's folder
    workers: int = key(2, least=0)  # processes that read
    timeout_seconds: int | None = key(None, above=0)  # for an image that they do not bring; null: as in training


@dataclass
class Prediction(TrainedNetwork):
    """Everything that defines one run of scripts.predict."""

    data: TrainedData = field(default_factory=TrainedData)
    input: str = MISSING  # an image, or a folder whose PNG and JPEG files are predicted, those of its folders too
    output: str = MISSING  # folder


ALTERNATIVES = {
    "norm": {
        "std": StandardNorm,
        "checkpoint": CheckpointNorm,
        "checkpoint_xhat": CheckpointXHatNorm,
        "inplace_1": InPlaceNorm1,
        "inplace": InPlaceNorm,
        "package": PackageNorm,
    },
    "body": {"resnext": ResNeXtBody, "wider_resnet": WiderResNetBody},
    "head": {"deeplabv3": DeepLabV3Head},
    "sampler": {"uniform": UniformSampler, "class_uniform": ClassUniformSampler},
    "data": {name: CocoStuffData if name == "coco_stuff" else Data for name in DATASETS},
    "loss": {"cross_entropy": CrossEntropyLoss, "bootstrapped": BootstrappedLoss},
}
