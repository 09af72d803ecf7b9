"""Configuration keys -> what learns: optimiser, schedule, precision."""

import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from datasets import minibatches_per_epoch
from engine.build.network import forward
from engine.distributed import World, node_group
from engine.learner import Learner
from engine.schedule import Schedule, in_steps
from engine.schema.network import OurNorm
from engine.schema.training import Optim, Trainer, TrainingRun
from models.layers.backends.compiled import check_compiler


def arithmetic(config: Trainer) -> None:
    """Choose, for this process, how CUDA computes in float32, and whether algorithms must be deterministic."""
    torch.backends.cuda.matmul.allow_tf32 = config.tf32
    torch.backends.cudnn.allow_tf32 = config.tf32
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # otherwise cuBLAS refuses
    torch.use_deterministic_algorithms(config.deterministic)


def learner(
    config: TrainingRun, make: Callable[[dist.ProcessGroup | None], nn.Module], total_steps: int, world: World
) -> Learner:
    """The network as `config.seed` initialises it, on its device, with everything that changes it.

    From here on each process draws its own random numbers (dropout). Rank 0 draws the same numbers as a run in one
    process.

    Args:
        make: the network on the CPU, from the process group of synchronised norms (None is all processes).

    Raises:
        ValueError: the network is to be compiled, and there is no compiler; or `make` raises it.
    """
    trainer = config.trainer
    torch.manual_seed(config.seed)
    plain = forward(config, make(_sync_group(config, world)), world.device)
    if world.rank:
        torch.manual_seed(config.seed + (world.rank << 32))
    average = None
    if trainer.ema_decay is not None:
        average = AveragedModel(plain.network, multi_avg_fn=get_ema_multi_avg_fn(trainer.ema_decay))
    trained = plain.network
    if trainer.compile:
        check_compiler(world.device.type, asked="trainer.compile=true", instead="trainer.compile=false")
        trained = torch.compile(trained, fullgraph=True, dynamic=False)
    if world.size > 1:
        on_cuda = world.device.type == "cuda"
        trained = DistributedDataParallel(
            trained,
            device_ids=[world.device] if on_cuda else None,
            gradient_as_bucket_view=True,
            broadcast_buffers=False,  # the first process's are shared before they are needed, for evaluations
            # Otherwise it lays out its buckets anew after the first step, and with them the order in which the
            # gradients of three or more processes are summed: a resumed run would round differently.
            find_unused_parameters=trainer.deterministic or not on_cuda,
        )
    sgd = optimizer(config.optim, plain.network.parameters())
    return Learner(
        network=plain.network,
        forward=plain.through(trained),
        optimizer=sgd,
        scheduler=lr_schedule(config.optim, sgd, total_steps),
        scaler=torch.amp.GradScaler(world.device.type, enabled=trainer.precision == "float16"),
        accumulation_steps=trainer.accumulation_steps,
        average=average,
        max_gradient_norm=config.optim.max_gradient_norm,
    )


def _sync_group(config: TrainingRun, world: World) -> dist.ProcessGroup | None:
    """The processes that share the statistics of synchronised norms; None is all of them."""
    norm = config.norm
    if isinstance(norm, OurNorm) and norm.sync and norm.sync_group == "node":
        return node_group(world, config.trainer.timeout_seconds)
    return None


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
    # Otherwise GradScaler calls it for infinite gradients too: that leaves the weights unchanged, but the first
    # momentum would start from uninitialised memory.
    sgd._step_supports_amp_scaling = False
    return sgd


def lr_schedule(config: Optim, optimizer: torch.optim.Optimizer, total_steps: int):
    """lr * (1 - step / total_steps)^power (paper, section 4.2), advanced after every optimiser step."""
    return torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=total_steps, power=config.power)


def schedule_of(config: TrainingRun, images: int) -> Schedule:
    """The run's durations in steps; `images` is the size of the training split. ValueError if no minibatch is full."""
    trainer = config.trainer
    steps_per_epoch = minibatches_per_epoch(images, config.data.crops_per_minibatch, key="data.crops_per_minibatch")
    total_steps = in_steps(trainer.epochs, trainer.steps, steps_per_epoch)
    assert total_steps is not None, "Trainer.check requires epochs or steps"
    return Schedule(
        total_steps=total_steps,
        steps_per_epoch=steps_per_epoch,
        evaluate_every=in_steps(trainer.evaluate_every_epochs, trainer.evaluate_every_steps, steps_per_epoch),
        checkpoint_every=trainer.checkpoint_every_steps,
        log_every=trainer.log_every_steps,
    )
