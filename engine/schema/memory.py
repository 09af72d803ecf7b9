"""Keys of the memory planner."""

import re
from dataclasses import dataclass

from engine.schema.keys import key

UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "kB": 10**3, "MB": 10**6, "GB": 10**9}


def bytes_of(name: str, text: str) -> int:
    """The number of bytes that a text such as 12GiB gives. ValueError, naming the key, if it gives none."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([A-Za-z]+)", text.strip(), re.ASCII)
    if match is None or match[2] not in UNITS:
        raise ValueError(f"{name}={text}: expected a number and one of {', '.join(UNITS)}, such as 12GiB")
    return round(float(match[1]) * UNITS[match[2]])


@dataclass
class Memory:
    """The memory of a device, and the part of it that a step's tensors cannot use."""

    budget: str | None = key(None, free_on_resume=True)  # of each device, e.g. 12GiB
    gpus: int | None = key(None, above=0, free_on_resume=True)  # that share a minibatch; null: this run's processes
    # What to choose by the budget: the most crops of data.crop_size (batch), or the largest crop with
    # data.crops_per_minibatch (crop). A resumed run keeps what it started with.
    fit: str | None = key(None, one_of=("batch", "crop"), free_on_resume=True)
    context: str = key("0.5GiB", free_on_resume=True)  # of CUDA, cuDNN and cuBLAS, outside PyTorch's allocator
    workspace: str = key("0.3GiB", free_on_resume=True)  # of convolutions
    fragmentation: float = key(0.0, least=0, most=0.9, free_on_resume=True)  # share of the rest that stays unused

    def check(self) -> None:
        if self.fit is not None and self.budget is None:
            raise ValueError(f"memory.fit={self.fit} needs a device's memory: give memory.budget=…, such as 12GiB")
        available = self.available()
        if available is not None and available <= 0:
            raise ValueError(
                f"memory.budget={self.budget} leaves nothing for tensors: memory.context={self.context} and "
                f"memory.workspace={self.workspace} are taken off"
            )

    def reserved(self) -> int:
        """Bytes of each device that tensors cannot use."""
        return bytes_of("memory.context", self.context) + bytes_of("memory.workspace", self.workspace)

    def available(self) -> int | None:
        """Bytes of each device for tensors; None without a budget."""
        if self.budget is None:
            return None
        return int((bytes_of("memory.budget", self.budget) - self.reserved()) * (1 - self.fragmentation))
