"""What a run needs to go on after a step, and how it is put back."""

import logging

import torch
from torch import Tensor

from engine.distributed import World
from engine.learner import Learner

logger = logging.getLogger(__name__)


def run_state(learner: Learner, step: int, world: World) -> dict:
    """The state after `step` steps, in plain containers and tensors; every process must call it.

    Averaged weights are kept under the names of the network's own.

    Raises:
        FloatingPointError: a weight or statistic is not finite. A checkpoint of such a network is of no use.
    """
    broken = [name for name, tensor in learner.network.state_dict().items() if not tensor.isfinite().all()]
    if broken:
        raise FloatingPointError(
            f"after step {step}, {len(broken)} weights and statistics are not finite, {broken[0]} among them"
        )
    state = {
        "step": step,
        "network": learner.network.state_dict(),
        "optimizer": learner.optimizer.state_dict(),
        "scheduler": learner.scheduler.state_dict(),
        "random": _random_states(world),  # dropout draws from these
    }
    if learner.scaler.is_enabled():
        state["scaler"] = learner.scaler.state_dict()
    if learner.average is not None:
        state["ema"] = learner.average.module.state_dict()
        state["ema_updates"] = int(learner.average.n_averaged)
    return state


def restore_run(state: dict, learner: Learner, world: World) -> int:
    """Put a `run_state` back, in each process; returns the number of steps done.

    With another number of processes, or another kind of device, random numbers cannot go on; a notice is logged.
    """
    learner.network.load_state_dict(state["network"])
    learner.optimizer.load_state_dict(state["optimizer"])
    learner.scheduler.load_state_dict(state["scheduler"])
    if learner.scaler.is_enabled():
        learner.scaler.load_state_dict(state["scaler"])
    if learner.average is not None:
        learner.average.module.load_state_dict(state["ema"])
        learner.average.n_averaged.fill_(state["ema_updates"])
    _restore_random(state["random"], world)
    return state["step"]


def _random_states(world: World) -> dict[str, list[Tensor]]:
    """The states of the random number generators of all processes, by rank."""
    on_device = torch.cuda.get_rng_state(world.device) if world.device.type == "cuda" else None
    states = world.gather((torch.get_rng_state(), on_device))
    return {"cpu": [cpu for cpu, _ in states], "cuda": [cuda for _, cuda in states if cuda is not None]}


def _restore_random(random: dict, world: World) -> None:
    cpu, cuda = random["cpu"], random["cuda"]
    if isinstance(cpu, Tensor):  # written before runs had ranks: one process, with the states of all its devices
        cpu, cuda = [cpu], cuda[:1]
    before, now = (len(cpu), "cuda" if cuda else "cpu"), (world.size, world.device.type)
    if before == now:
        torch.set_rng_state(cpu[world.rank])
        if cuda:
            torch.cuda.set_rng_state(cuda[world.rank], world.device)
        return
    torch.set_rng_state(cpu[0])
    torch.manual_seed(int(torch.randint(2**62, ())) + world.rank)  # of CUDA, too
    if world.first:
        logger.warning(
            f"the run was on {before[0]} x {before[1]} and continues on {now[0]} x {now[1]}: at the same step with the "
            f"same samples, but dropout draws other numbers than it would have there, and norms that are not "
            f"synchronised see {before[0] / now[0]:.3g} times as many crops"
        )
