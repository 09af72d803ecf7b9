"""From a run's configuration to its objects: the only place below the entries that knows both."""

import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset

from datasets import (
    ClassUniformMinibatches,
    ColourJitter,
    SegmentationDataset,
    ShuffledMinibatches,
    TrainingCrops,
    TrainingTransform,
    WholeImages,
    Workers,
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
from engine.distributed import World, node_group
from engine.image_input import Autocast, ImageInput
from engine.inference import Views
from engine.initial_weights import Initialised, initialise_from
from engine.learner import Learner
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
    Trainer,
    WiderResNetBody,
)
from models.bodies.resnext import ResNeXt
from models.bodies.wider_resnet import WiderResNet
from models.heads import DeepLabV3
from models.layers import ABN, CheckpointedABN, InPlaceABN
from models.layers.backends.compiled import check_compiler
from models.package import package_abn
from models.segmentation import SegmentationNetwork

logger = logging.getLogger(__name__)


def dataset(config: Data, split: str, strict: bool = True) -> SegmentationDataset:
    """One split of the dataset, its files paired and counted but not yet read. Raises ValueError for missing files.

    Not `strict`: images without labels and labels without images are among its files, with None for what is missing.
    """
    make, _ = _source(config)
    return make(config.root, split, strict=strict)


def official_images(config: Data) -> dict[str, int]:
    """The number of images in each split of the dataset, as its publishers state it."""
    _, images = _source(config)
    return images


def _source(config: Data) -> tuple[Callable[..., SegmentationDataset], dict[str, int]]:
    """What makes a split, and what `official_images` returns."""
    if isinstance(config, CocoStuffData):
        make = partial(coco_stuff, lists=config.lists, other_class=config.other_class)
        return make, COCO_STUFF_IMAGES[config.lists]
    return {
        "camvid": (camvid, CAMVID_IMAGES),
        "cityscapes": (cityscapes, CITYSCAPES_IMAGES),
        "synthetic": (synthetic, SYNTHETIC_IMAGES),
        "vistas": (vistas, VISTAS_IMAGES),
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


def norm_act(config: Norm, group: dist.ProcessGroup | None = None) -> Callable[[int], nn.Module]:
    """number of channels -> norm followed by an activation; `group` is that of synchronised ones, None all processes.

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
    options.update(learn_scale=config.learn_scale, sync=config.sync, group=group, backend=config.backend)
    if isinstance(config, InPlaceNorm):
        variant = "I" if isinstance(config, InPlaceNorm1) else "II"
        return partial(InPlaceABN, **options, variant=variant, gamma_floor=config.gamma_floor)
    if isinstance(config, (CheckpointNorm, CheckpointXHatNorm)):
        return partial(CheckpointedABN, **options, store="x" if isinstance(config, CheckpointNorm) else "x_hat")
    return partial(ABN, **options)


def arithmetic(config: Trainer) -> None:
    """Choose, for this process, how CUDA computes in float32, and whether algorithms must be deterministic."""
    torch.backends.cuda.matmul.allow_tf32 = config.tf32
    torch.backends.cudnn.allow_tf32 = config.tf32
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else cuBLAS refuses
    torch.use_deterministic_algorithms(config.deterministic)


def learner(config: SegmentationRun, classes: int, total_steps: int, world: World) -> Learner:
    """The network as `config.seed` initialises it, on its device, with what changes it.

    From here on each process has random numbers of its own (dropout); the first one's are those of a single process.

    Raises:
        ValueError: it is to be compiled, and there is no compiler.
    """
    trainer = config.trainer
    torch.manual_seed(config.seed)
    trained = network_on(config, classes, world.device, _sync_group(config, world))
    if world.rank:
        torch.manual_seed(config.seed + (world.rank << 32))
    average = None
    if trainer.ema_decay is not None:
        average = AveragedModel(trained, multi_avg_fn=get_ema_multi_avg_fn(trainer.ema_decay))
    forward = trained
    if trainer.compile:
        check_compiler(world.device.type, asked="trainer.compile=true", instead="trainer.compile=false")
        forward = torch.compile(forward, fullgraph=True, dynamic=False)
    if world.size > 1:
        on_cuda = world.device.type == "cuda"
        forward = DistributedDataParallel(
            forward,
            device_ids=[world.device] if on_cuda else None,
            gradient_as_bucket_view=True,
            broadcast_buffers=False,  # the first process's are shared before they are needed, for evaluations
            # Else it lays out its buckets anew after the first step, and with them the order in which three or more
            # processes' gradients are summed: a resumed run would round differently.
            find_unused_parameters=trainer.deterministic or not on_cuda,
        )
    sgd = optimizer(config.optim, trained.parameters())
    return Learner(
        network=trained,
        forward=forward,
        optimizer=sgd,
        scheduler=lr_schedule(config.optim, sgd, total_steps),
        scaler=torch.amp.GradScaler(world.device.type, enabled=trainer.precision == "float16"),
        average=average,
        max_gradient_norm=config.optim.max_gradient_norm,
    )


def _sync_group(config: SegmentationRun, world: World) -> dist.ProcessGroup | None:
    """The processes that share the statistics of synchronised norms; None is all of them."""
    norm = config.norm
    if isinstance(norm, OurNorm) and norm.sync and norm.sync_group == "node":
        return node_group(world, config.trainer.timeout_seconds)
    return None


def network_on(
    config: SegmentationRun, classes: int, device: torch.device, group: dist.ProcessGroup | None = None
) -> SegmentationNetwork:
    """`network` on a device, in the memory format of the run."""
    memory_format = torch.channels_last if config.trainer.channels_last else torch.contiguous_format
    return network(config, classes, group).to(device, memory_format=memory_format)


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


def network(config: SegmentationRun, classes: int, group: dist.ProcessGroup | None = None) -> SegmentationNetwork:
    """Body, head and classifier, initialised from torch's global generator, on the current default device."""
    norm = norm_act(config.norm, group)
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


def initialise(config: SegmentationRun, learner: Learner, classes: tuple[str, ...]) -> Initialised:
    """Put the weights of `init.weights` into the network. ValueError as of `initialise_from`.

    Averaged weights start with those that the first step leaves.
    """
    return initialise_from(
        learner.network,
        Path(config.init.weights).expanduser(),
        classes,
        format=config.init.format,
        part=config.init.part,
        package=isinstance(config.norm, PackageNorm),
    )


def optimizer(config: Optim, parameters) -> torch.optim.SGD:
    """SGD with weight decay on every parameter, the norms' included, as in the paper's recipe."""
    sgd = torch.optim.SGD(
        parameters,
        lr=config.lr,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
        nesterov=config.nesterov,
        fused=config.fused,
    )
    # Else GradScaler calls it for infinite gradients too: it leaves the weights, but what it takes up as its first
    # momentum is memory that nobody has written to.
    sgd._step_supports_amp_scaling = False
    return sgd


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
    world: World,
    start_step: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> DataLoader:
    """One minibatch of crops for each step from `start_step` to `total_steps`; of each, this process's share.

    Class-uniform sampling needs the class index, which is made here where it is not kept yet: `progress(done, total)`
    counts its images.

    Raises:
        ValueError: the minibatches do not fit the images or the processes, or the class index cannot be made.
    """
    data, sampler = config.data, config.sampler
    options = dict(
        crops_per_minibatch=data.crops_per_minibatch,
        seed=config.seed,
        steps=total_steps,
        start_step=start_step,
        rank=world.rank,
        world_size=world.size,
    )
    if isinstance(sampler, ClassUniformSampler):
        skips = data.on_error == "skip"
        index = index_classes(dataset, sampler.folder, sampler.positions, progress=progress, skip_unreadable=skips)
        absent = index.absent()
        if absent and world.first:
            logger.warning(
                f"class-uniform sampling: {len(absent)} of {len(index.classes)} classes have no pixel in the training "
                f"split and are not drawn: {', '.join(absent)}"
            )
        minibatches = ClassUniformMinibatches(index, fraction=sampler.fraction, **options)
    else:
        minibatches = ShuffledMinibatches(len(dataset), **options)
    crops = training_crops(data, dataset, config.seed)
    return _loader(crops, data.workers, world.device, data.timeout_seconds, batch_sampler=minibatches)


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
    return TrainingCrops(dataset, transform, seed, skip_unreadable=config.on_error == "skip")


def evaluation_loader(
    dataset: SegmentationDataset, workers: int, timeout_seconds: int, world: World, images: int | None
) -> DataLoader:
    """Whole images one at a time, in order; of the first `images` of them those of this process, none twice."""
    count = len(dataset) if images is None else min(images, len(dataset))
    indices = evaluation_shard(count, world.rank, world.size)
    return _loader(WholeImages(dataset), workers, world.device, timeout_seconds, sampler=indices, batch_size=1)


def _loader(source: Dataset, workers: int, device: torch.device, timeout_seconds: int, **batching) -> DataLoader:
    return DataLoader(
        source,
        num_workers=workers,
        timeout=timeout_seconds if workers else 0,
        worker_init_fn=worker_init,
        multiprocessing_context=Workers() if workers else None,
        pin_memory=device.type == "cuda",
        # Its own generator: an iterator draws a number when it starts, and evaluating must not change the training.
        generator=torch.Generator(),
        **batching,
    )


def image_input(config: SegmentationRun, device: torch.device) -> ImageInput:
    data = config.data
    return ImageInput(data.mean, data.std, device, config.trainer.channels_last, base_size=data.base_size)


def autocast(precision: str, device: torch.device) -> Autocast:
    """Makes the context of a forward pass in the given precision ("float32", "bfloat16" or "float16")."""
    dtype = getattr(torch, precision)
    low = torch.bfloat16 if dtype == torch.float32 else dtype  # autocast does not know float32, which needs none
    return partial(torch.autocast, device.type, low, enabled=dtype != torch.float32)


def views(options: TrainedNetwork) -> Views:
    """What of an image the network sees."""
    return Views(options.window.size, options.window.overlap, tuple(options.tta.scales), options.tta.flip)
