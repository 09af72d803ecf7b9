"""Keys of the memory planner."""

from dataclasses import dataclass

from engine.schema.keys import key
from keepless.fit import CONTEXT, FRAGMENTATION, WORKSPACE
from keepless.units import UNITS, bytes_of

NCCL = "0.2GiB"  # its buffers, with several devices
CAPTURED = 0.15  # of the tensors' bytes, for a CUDA graph's pool: 4 to 14 % (docs/results/steps.md, reserved)
MOST_BYTES = 2**50


@dataclass
class Memory:
    """The memory of each device. A step's tensors get what `deductions` leave (in `keepless.fit` the same, but NCCL).

    They are calibrated, not measured: the largest with which every row of the paper's Table 3 still fits its four
    devices of 12 GB. docs/results/memory_plan.md compares the planner's choices with the table.
    """

    budget: str | None = key(None, free_on_resume=True)  # memory of each device, e.g. 12GiB
    gpus: int | None = key(None, above=0, free_on_resume=True)  # devices that share a minibatch; null: this run's
    # Choose by memory.budget: the most crops of data.crop_size (batch; the paper's FIXED CROP), or the largest
    # crop with data.crops_per_minibatch (crop; the paper's FIXED BATCH). A resumed run keeps its first choice.
    fit: str | None = key(None, one_of=("batch", "crop"), free_on_resume=True)
    # With trainer.recompute=budget, the most time (estimated) that fit allows, relative to keeping all activations.
    time: float = key(1.15, least=1, free_on_resume=True)
    # With trainer.recompute=budget, memory of the forward and backward pass, without weights, momentum, gradients,
    # images and loss; null: what memory.budget leaves.
    activations: str | None = key(None, free_on_resume=True)

    def check(self) -> None:
        """ValueError: a text is no size, or keys exclude each other, need another, or leave nothing for tensors."""
        if self.fit is not None and self.budget is None:
            raise ValueError(f"memory.fit={self.fit} needs a device's memory: give memory.budget=…, such as 12GiB")
        if self.activations is not None and self.budget is not None:
            raise ValueError(
                f"memory.activations={self.activations} with memory.budget={self.budget}: give one of them"
            )
        for name, text in (("activations", self.activations), ("budget", self.budget)):
            size_bytes = None if text is None else bytes_of(text)
            if text is not None and (size_bytes is None or size_bytes > MOST_BYTES):
                limits = f"a number and one of {', '.join(UNITS)}, such as 12GiB; at most 1,048,576GiB"
                raise ValueError(f"memory.{name}={text}: expected {limits}")
        device_count = self.gpus or 1
        if self.budget is not None and self.available(device_count) <= 0:
            raise ValueError(f"memory.budget={self.budget}: expected more than {deductions(device_count)}")

    def available(self, device_count: int, is_captured: bool = False) -> int:
        """Bytes of `budget` for tensors on each device, also of captured steps."""
        reserved = (CONTEXT, WORKSPACE, NCCL) if device_count > 1 else (CONTEXT, WORKSPACE)
        unreserved = (bytes_of(self.budget or "") or 0) - sum(bytes_of(part) or 0 for part in reserved)
        left = unreserved * (1 - FRAGMENTATION)
        return int(left / (1 + CAPTURED) if is_captured else left)

    def activation_bytes(self) -> int | None:
        """`activations` as a number; None if it is not given."""
        return None if self.activations is None else bytes_of(self.activations)


def deductions(device_count: int) -> str:
    """What is subtracted from a device's memory, as text."""
    nccl = f"{NCCL} for NCCL, " if device_count > 1 else ""
    return f"{CONTEXT} for CUDA, {nccl}{WORKSPACE} for convolutions and {FRAGMENTATION:.0%} of the rest"
