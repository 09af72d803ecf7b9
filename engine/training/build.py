"""Configuration keys -> the learner of a run."""

import torch
from torch import nn

from engine.assemble import optimization
from engine.assemble.contracts import batch_problem
from engine.assemble.network import forward
from engine.assemble.tasks import network_of
from engine.process.distributed import World, data_parallel
from engine.schema.schedule import Schedule
from engine.schema.training import Trainer, TrainingRun
from engine.training.capture import CapturedMicroBatches, listed_few, random_modules
from engine.training.learner import Learner, WeightAverage
from keepless.norms.backends.compiled import check_compiler
from models.cpu_gradients import KINDS, correct_gradients, wrong_gradients
from models.forward import Forward
from models.segmentation import SegmentationNetwork


def learner(
    config: TrainingRun, class_count: int, schedule: Schedule, world: World, eager_because: str = ""
) -> Learner:
    """Build the network on its device, initialised from `config.seed`, with everything that trains it.

    From here on each rank draws its own random numbers (dropout); rank 0 draws the same as a run in one process.

    `eager_because`: see `planner.fit_to_budget`.
    ValueError: the network is to be compiled but there is no compiler; PyTorch would compute wrong gradients of it; its
    head decides for what is no class; or see `lr_schedule`, `network_of`.
    """
    torch.manual_seed(config.seed)
    plain = forward(config, network_of(config, class_count), world.device)
    if isinstance(plain.network, SegmentationNetwork):
        _check_classes_of_head(plain.network, world.device)
    if world.device.type == "cpu" and (config.trainer.channels_last or config.trainer.precision == "bfloat16"):
        _correct_cpu_gradients(config.trainer, plain.network)
    if world.rank:
        torch.manual_seed(config.seed + (world.rank << 32))
    return learner_of(config, plain, schedule, world, eager_because)


def _check_classes_of_head(network: SegmentationNetwork, device: torch.device) -> None:
    """Raise an error unless `decide` of the head returns a class for every pixel, which evaluations need.

    The head is in eval mode afterwards, until a `Learner` trains it.
    """
    network.head.eval()
    with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
        network.decide(torch.zeros(1, network.classes, 64, 64, device=device))


def _correct_cpu_gradients(trainer: Trainer, network: nn.Module) -> None:
    """Correct gradients of convolutions that PyTorch computes wrongly on a CPU. ValueError: that is not possible."""
    if not trainer.compile:
        wrong = correct_gradients(network, trainer.precision)
    elif trainer.precision == "bfloat16":
        wrong = wrong_gradients(network, "bfloat16")
    else:  # TorchInductor chooses memory formats itself
        wrong = []
    if wrong:
        cures = ["trainer.precision=float32"] if trainer.precision == "bfloat16" else []
        if trainer.compile:
            cures.append("trainer.compile=false")
        raise ValueError(
            f"trainer.precision={trainer.precision}, trainer.compile={str(trainer.compile).lower()}: on a CPU PyTorch "
            f"computes wrong gradients of {wrong[0]}, {KINDS[trainer.precision]}; give "
            f"{' or '.join(cures) or 'trainer.channels_last=false'}"
        )


def learner_of(
    config: TrainingRun, plain: Forward, schedule: Schedule, world: World, eager_because: str | None = ""
) -> Learner:
    """The learner of a network on its device, with optimiser, schedule, loss scale, average. See `learner`."""
    trainer = config.trainer
    network = plain.network
    eager_because = eager_because or why_eager(config, network, schedule.total_steps, world)
    captured = None
    if eager_because is None:
        world.share(network.parameters())  # as DDP does: other machines may round random weights differently
        captured = CapturedMicroBatches(network, _repetition_key(trainer), trainer.capture is True)
    optimizer = optimization.optimizer(config.optim, network, config.head_modules)
    return Learner(
        network=network,
        forward=plain.with_network(_trained_network(trainer, network, world, in_ddp=captured is None)),
        optimizer=optimizer,
        scheduler=optimization.lr_schedule(config.lr_schedule, optimizer, schedule, trainer.smoke),
        scaler=torch.amp.GradScaler(world.device.type, enabled=trainer.precision == "float16"),
        accumulation_steps=trainer.accumulation_steps,
        average=None if trainer.ema_decay is None else WeightAverage(network, trainer.ema_decay),
        max_gradient_norm=config.optim.max_gradient_norm,
        captured=captured,
        eager_because=eager_because or "",
    )


def _trained_network(trainer: Trainer, network: nn.Module, world: World, in_ddp: bool) -> nn.Module:
    """The network as training steps call it: compiled if configured, and with several ranks in DDP."""
    trained = network
    if trainer.compile:
        check_compiler(world.device.type, setting="trainer.compile=true", instead="trainer.compile=false")
        trained = torch.compile(trained, fullgraph=True, dynamic=False)  # type: ignore[assignment]  # it is a module
    if world.size == 1 or not in_ddp:
        return trained
    unread_feature = getattr(network, "unread_feature", "")
    if unread_feature:
        raise ValueError(
            f"no head reads {unread_feature}, the last feature of the body, so its layers get no gradients, for which "
            f"processes wait: let the head read it too (reads = (…, -1)), choose a shorter body, or one device"
        )
    return data_parallel(trained, world.device, trainer.deterministic or world.device.type == "cpu")


def why_eager(config: TrainingRun, network: nn.Module, steps: int, world: World) -> str | None:
    """Why a run of so many steps is not captured in CUDA graphs, empty if `trainer.capture` says so; None if it is."""
    trainer = config.trainer
    if trainer.capture != "auto":
        return None if trainer.capture else ""
    problem = config.capture_problem(world.device.type, world.size) or batch_problem(config)
    problem = problem or config.capture_doubt(world.size, steps)
    if problem:
        return problem
    repeats = _repetition_key(trainer)
    names = random_modules(getattr(network, "body", network)) if repeats else []
    return f"{repeats} repeats modules that draw random numbers{listed_few(names)}" if names else None


def _repetition_key(trainer: Trainer) -> str:
    """The key that makes backward passes run blocks again; empty if none does. (Reversible bodies draw no numbers.)"""
    return f"trainer.recompute={trainer.recompute}" if trainer.recompute in ("blocks", "sqrt") else ""
