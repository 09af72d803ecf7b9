"""From a run's configuration to its objects: the only place below the entries that knows both."""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from datasets import (
    ClassUniformMinibatches,
    ColourJitter,
    SegmentationDataset,
    ShuffledMinibatches,
    TrainingCrops,
    TrainingTransform,
    WholeImages,
    camvid,
    cityscapes,
    coco_stuff,
    evaluation_shard,
    index_classes,
    minibatches_per_epoch,
    synthetic,
    vistas,
    worker_init,
)
from datasets.camvid import IMAGES as CAMVID_IMAGES
from datasets.cityscapes import IMAGES as CITYSCAPES_IMAGES
from datasets.coco_stuff import IMAGES as COCO_STUFF_IMAGES
from datasets.synthetic import IMAGES as SYNTHETIC_IMAGES
from datasets.vistas import IMAGES as VISTAS_IMAGES
from engine.inference import Views
from engine.loop import Autocast, ImageInput
from engine.losses import BootstrappedCrossEntropy, CrossEntropy
from engine.schedule import Schedule, in_steps
from engine.schema import (
    Body,
    BootstrappedLoss,
    CheckpointNorm,
    CheckpointXHatNorm,
    ClassUniformSampler,
    CocoStuffData,
    Data,
    InPlaceNorm,
    InPlaceNorm1,
    Loss,
    Norm,
    Optim,
    OurNorm,
    PackageNorm,
    ResNeXtBody,
    SegmentationRun,
    TrainedNetwork,
    WiderResNetBody,
)
from models.bodies.resnext import ResNeXt
from models.bodies.wider_resnet import WiderResNet
from models.heads import DeepLabV3
from models.layers import ABN, CheckpointedABN, InPlaceABN
from models.package import package_abn
from models.segmentation import SegmentationNetwork


def device(name: str) -> torch.device:
    """The device of `trainer.device`; "auto" is CUDA where there is one.

    Raises:
        ValueError: "cuda" where PyTorch sees no CUDA device.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device=cuda, but PyTorch sees no CUDA device: use device=cpu, or check the driver")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def dataset(config: Data, split: str, strict: bool = True) -> SegmentationDataset:
    """One split of the dataset, its files paired and counted but not yet read. Raises ValueError for missing files.

    Not `strict`: images without labels and labels without images are among its files, with None for what is missing.
    """
    if isinstance(config, CocoStuffData):
        return coco_stuff(config.root, split, lists=config.lists, other_class=config.other_class, strict=strict)
    builders = {"camvid": camvid, "cityscapes": cityscapes, "synthetic": synthetic, "vistas": vistas}
    return builders[config.name](config.root, split, strict=strict)


def official_images(config: Data) -> dict[str, int]:
    """The number of images in each split of the dataset, as its publishers state it."""
    if isinstance(config, CocoStuffData):
        return COCO_STUFF_IMAGES[config.lists]
    return {
        "camvid": CAMVID_IMAGES,
        "cityscapes": CITYSCAPES_IMAGES,
        "synthetic": SYNTHETIC_IMAGES,
        "vistas": VISTAS_IMAGES,
    }[config.name]


def labelled_dataset(config: Data, key: str, split: str) -> SegmentationDataset:
    """As `dataset`; a split whose labels are withheld raises ValueError too. `key` is the config key of `split`."""
    try:
        built = dataset(config, split)
    except ValueError as error:
        raise ValueError(f"{key}={split}: {error}") from error
    if not built.has_labels:
        raise ValueError(f"{key}={split}: {config.name} has no labels in this split; choose one that has, such as val")
    return built


def norm_act(config: Norm) -> Callable[[int], nn.Module]:
    """number of channels -> norm followed by an activation.

    Raises:
        ValueError: the released package is not installed, where it is chosen.
    """
    options = dict(
        eps=config.eps,
        momentum=config.momentum,
        activation=config.activation,
        activation_param=config.activation_param,
    )
    if isinstance(config, PackageNorm):
        return partial(package_abn(), **options)
    assert isinstance(config, OurNorm), config
    options.update(learn_scale=config.learn_scale, sync=config.sync, backend=config.backend)
    if isinstance(config, InPlaceNorm):
        variant = "I" if isinstance(config, InPlaceNorm1) else "II"
        return partial(InPlaceABN, **options, variant=variant, gamma_floor=config.gamma_floor)
    if isinstance(config, (CheckpointNorm, CheckpointXHatNorm)):
        return partial(CheckpointedABN, **options, store="x" if isinstance(config, CheckpointNorm) else "x_hat")
    return partial(ABN, **options)


def trainable(
    config: SegmentationRun, classes: int, total_steps: int, device: torch.device
) -> tuple[SegmentationNetwork, torch.optim.SGD, torch.optim.lr_scheduler.PolynomialLR]:
    """The network as `config.seed` initialises it, on its device, with its optimiser and learning rate schedule."""
    torch.manual_seed(config.seed)
    built = network_on(config, classes, device)
    sgd = optimizer(config.optim, built.parameters())
    return built, sgd, lr_schedule(config.optim, sgd, total_steps)


def network_on(config: SegmentationRun, classes: int, device: torch.device) -> SegmentationNetwork:
    """`network` on a device, in the memory format of the run."""
    memory_format = torch.channels_last if config.trainer.channels_last else torch.contiguous_format
    return network(config, classes).to(device, memory_format=memory_format)


def body(config: Body, norm: Callable[[int], nn.Module]) -> nn.Module:
    """Features of images, without a classifier."""
    if isinstance(config, ResNeXtBody):
        return ResNeXt(
            config.structure,
            norm,
            output_stride=config.output_stride,
            groups=config.groups,
            base_channels=config.base_channels,
            stem_channels=config.stem_channels,
            stem=config.stem,
        )
    assert isinstance(config, WiderResNetBody), config
    return WiderResNet(
        config.structure,
        config.channels,
        norm,
        output_stride=config.output_stride,
        downsampling=config.downsampling,
        dropout=config.dropout,
        stem_channels=config.stem_channels,
    )


def network(config: SegmentationRun, classes: int) -> SegmentationNetwork:
    """Body, head and classifier, initialised from torch's global generator, on the current default device."""
    norm = norm_act(config.norm)
    features = body(config.body, norm)
    head = DeepLabV3(
        features.out_channels,
        config.head.hidden_channels,
        config.head.dilations,
        norm_act=norm,
        pooling_size=config.head.pooling_size,
        out_channels=config.head.out_channels,
    )
    return SegmentationNetwork(features, head, classes)


def loss(config: Loss, ignore_index: int) -> nn.Module:
    if isinstance(config, BootstrappedLoss):
        return BootstrappedCrossEntropy(config.fraction, ignore_index)
    return CrossEntropy(ignore_index)


def optimizer(config: Optim, parameters) -> torch.optim.SGD:
    """SGD with weight decay on every parameter, the norms' included, as in the paper's recipe."""
    return torch.optim.SGD(
        parameters,
        lr=config.lr,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
        nesterov=config.nesterov,
        fused=True,  # one pass over each parameter
    )


def lr_schedule(config: Optim, optimizer: torch.optim.Optimizer, total_steps: int):
    """lr * (1 - step / total_steps)^power (paper, section 4.2), advanced after every optimiser step."""
    return torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=total_steps, power=config.power)


def schedule(config: SegmentationRun, images: int) -> Schedule:
    """The run's durations in steps; `images` is the size of the training split."""
    trainer = config.trainer
    steps_per_epoch = minibatches_per_epoch(images, config.data.crops_per_minibatch)
    total_steps = in_steps(trainer.epochs, trainer.steps, steps_per_epoch)
    assert total_steps is not None, "config.check requires epochs or steps"
    return Schedule(
        total_steps=total_steps,
        steps_per_epoch=steps_per_epoch,
        evaluate_every=in_steps(trainer.evaluate_every_epochs, trainer.evaluate_every_steps, steps_per_epoch),
        checkpoint_every=trainer.checkpoint_every_steps,
        log_every=trainer.log_every_steps,
    )


def training_loader(
    config: SegmentationRun,
    dataset: SegmentationDataset,
    total_steps: int,
    start_step: int,
    device: torch.device,
    rank: int = 0,
    world_size: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> DataLoader:
    """One minibatch of crops for each step from `start_step` to `total_steps`; of each, this rank's share.

    Class-uniform sampling needs the class index, which is made here where it is not kept yet: `progress(done, total)`
    counts its images.

    Raises:
        ValueError: the minibatches do not fit the images or the ranks, or the class index cannot be made.
    """
    data, sampler = config.data, config.sampler
    options = dict(
        crops_per_minibatch=data.crops_per_minibatch,
        seed=config.seed,
        steps=total_steps,
        start_step=start_step,
        rank=rank,
        world_size=world_size,
    )
    if isinstance(sampler, ClassUniformSampler):
        index = index_classes(dataset, sampler.folder, sampler.positions, progress=progress)
        minibatches = ClassUniformMinibatches(index, fraction=sampler.fraction, **options)
    else:
        minibatches = ShuffledMinibatches(len(dataset), **options)
    return _loader(training_crops(data, dataset, config.seed), data.workers, device, batch_sampler=minibatches)


def training_crops(config: Data, dataset: SegmentationDataset, seed: int) -> TrainingCrops:
    """The augmented crops that a sampler chooses from."""
    jitter = config.colour_jitter
    transform = TrainingTransform(
        (config.crop_size, config.crop_size),
        scale=tuple(config.scale),
        flip=config.flip,
        base_size=config.base_size,
        fill=tuple(255 * value for value in config.mean),
        ignore_index=dataset.ignore_index,
        colour_jitter=ColourJitter(**vars(jitter)) if any(vars(jitter).values()) else None,
    )
    return TrainingCrops(dataset, transform, seed)


def evaluation_loader(
    dataset: SegmentationDataset,
    workers: int,
    device: torch.device,
    images: int | None,
    rank: int = 0,
    world_size: int = 1,
) -> DataLoader:
    """Whole images one at a time, in order; of the first `images` of them those of this rank, none twice."""
    indices = evaluation_shard(len(dataset) if images is None else min(images, len(dataset)), rank, world_size)
    return _loader(WholeImages(dataset), workers, device, sampler=indices, batch_size=1)


def _loader(source: Dataset, workers: int, device: torch.device, **batching) -> DataLoader:
    return DataLoader(
        source,
        num_workers=workers,
        worker_init_fn=worker_init,
        pin_memory=device.type == "cuda",
        # Its own generator: an iterator draws a number when it starts, and evaluating must not change the training.
        generator=torch.Generator(),
        **batching,
    )


def image_input(config: SegmentationRun, device: torch.device) -> ImageInput:
    data = config.data
    return ImageInput(data.mean, data.std, device, config.trainer.channels_last, base_size=data.base_size)


def autocast(precision: str, device: torch.device) -> Autocast:
    """Makes the context of a forward pass in the given precision ("float32" or "bfloat16")."""
    return partial(torch.autocast, device.type, torch.bfloat16, enabled=precision == "bfloat16")


def views(options: TrainedNetwork) -> Views:
    """What of an image the network sees."""
    return Views(options.window.size, options.window.overlap, tuple(options.tta.scales), options.tta.flip)
