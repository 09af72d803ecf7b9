"""Configuration keys -> learner, schedule, precision."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from datasets import minibatches_per_epoch
from engine.assemble import optimization
from engine.assemble.network import forward
from engine.distributed import World, data_parallel, node_group
from engine.forward import Forward
from engine.learner import Learner, WeightAverage
from engine.records.waits import GradientExchange
from engine.schedule import Schedule, in_steps
from engine.schema.network import OurNorm
from engine.schema.training import Trainer, TrainingRun
from keepless.norms.backends.compiled import check_compiler


def arithmetic(config: Trainer, fixed_sizes: bool = False) -> None:
    """Set this process's TF32 and determinism. `fixed_sizes`: search for the fastest convolutions of each size."""
    torch.backends.cuda.matmul.allow_tf32 = config.tf32
    torch.backends.cudnn.allow_tf32 = config.tf32
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS requires it
    torch.use_deterministic_algorithms(config.deterministic)
    # A debugging aid that fills every new tensor.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # it is a property
    torch.backends.cudnn.benchmark = fixed_sizes and not config.deterministic


@contextmanager
def varying_sizes() -> Iterator[None]:
    """Context for images of many sizes: no search for the fastest convolutions, which is repeated for each size."""
    before, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, False
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def learner(
    config: TrainingRun, make: Callable[[dist.ProcessGroup | None], nn.Module], schedule: Schedule, world: World
) -> Learner:
    """Build the network on its device, initialised from `config.seed`, with everything that trains it.

    From here on each rank draws its own random numbers (dropout); rank 0 draws the same as a run in one process.

    `make` builds the network on the CPU, given the process group of synchronised norms (None: all processes).
    ValueError: the network is to be compiled but there is no compiler; or see `lr_schedule`, `make`.
    """
    torch.manual_seed(config.seed)
    norm = config.norm
    of_machines = isinstance(norm, OurNorm) and norm.sync and norm.sync_group == "node"
    group = node_group(world, config.trainer.timeout_seconds) if of_machines else None
    plain = forward(config, make(group), world.device)
    if world.rank:
        torch.manual_seed(config.seed + (world.rank << 32))
    return learner_of(config, plain, schedule, world)


def learner_of(config: TrainingRun, plain: Forward, schedule: Schedule, world: World) -> Learner:
    """Add everything that trains it to a network. ValueError: as from `learner`, which builds the network too."""
    trainer = config.trainer
    average = None if trainer.ema_decay is None else WeightAverage(plain.network, trainer.ema_decay)
    trained = plain.network
    if trainer.compile:
        check_compiler(world.device.type, asked="trainer.compile=true", instead="trainer.compile=false")
        trained = torch.compile(trained, fullgraph=True, dynamic=False)  # type: ignore[assignment]  # it is a module
    if world.size > 1:
        fixed_buckets = trainer.deterministic or world.device.type == "cpu"
        trained = data_parallel(trained, world.device, fixed_buckets)
    optimizer = optimization.optimizer(config.optim, plain.network, config.head_modules)
    return Learner(
        network=plain.network,
        forward=plain.through(trained),
        optimizer=optimizer,
        scheduler=optimization.lr_schedule(config.lr_schedule, optimizer, schedule, trainer.smoke),
        scaler=torch.amp.GradScaler(world.device.type, enabled=trainer.precision == "float16"),
        accumulation_steps=trainer.accumulation_steps,
        average=average,
        max_gradient_norm=config.optim.max_gradient_norm,
        exchange=GradientExchange(plain.network, world.device) if world.size > 1 else None,
    )


def schedule_of(config: TrainingRun, images: int) -> Schedule:
    """The run's schedule in steps, for `images` training images."""
    trainer = config.trainer
    steps_per_epoch = minibatches_per_epoch(images, config.data.crops_per_minibatch)
    total_steps = in_steps(trainer.epochs, trainer.steps, steps_per_epoch)
    assert total_steps is not None, "TrainingRun.check requires epochs or steps"
    return Schedule(
        total_steps=total_steps,
        steps_per_epoch=steps_per_epoch,
        evaluate_every=in_steps(trainer.evaluate_every_epochs, trainer.evaluate_every_steps, steps_per_epoch),
        checkpoint_every=trainer.checkpoint_every_steps,
        log_every=trainer.log_every_steps,
    )
