"""The switches to measure: overrides of a training."""

from typing import NamedTuple


class Switch(NamedTuple):
    overrides: tuple[str, ...]  # of train_seg.py
    only_cuda: bool = False
    freed_memory_kept: bool = True  # on the CPU, by engine.memory.keep_freed_memory
    data: str = "in memory"  # where minibatches come from: see Training.endless
    title: str | None = None

    @property
    def name(self) -> str:
        return self.title or " ".join(self.overrides)

    @property
    def graphs(self) -> int:
        """How many graphs torch.compile may make: one per micro-batch size (8 crops are split into 3 + 3 + 2)."""
        return 2 if "trainer.accumulation_steps=3" in self.overrides else 1


DEFAULT = "default"
LONG = 100_000  # steps, more than a benchmark takes
PLAIN = Switch((), title=DEFAULT)
COMPILE, STANDARD, BFLOAT16 = "trainer.compile=true", "norm=std", "trainer.precision=bfloat16"
GROUPS = {
    "switches": (
        PLAIN,
        Switch((BFLOAT16,)),
        Switch(("trainer.precision=float16",)),
        Switch(("trainer.tf32=true",), only_cuda=True),
        Switch(("trainer.channels_last=false",)),
        Switch(("optim.fused=false",)),
        Switch((), only_cuda=True, data="not prefetched", title="without prefetching"),
        Switch(("trainer.ema_decay=0.999",)),
        Switch(("optim.max_gradient_norm=1",)),
        Switch(("trainer.accumulation_steps=2",)),
        Switch(("trainer.accumulation_steps=4",)),
        Switch(("trainer.deterministic=true",)),
        Switch((f"trainer.profile={LONG}",), title="trainer.profile, while it traces"),
    ),
    "data": (
        PLAIN,
        Switch((), data="on the device", title="one minibatch, kept on the device"),
        Switch(("data.workers=2",), data="read"),
    ),
    "norms": (PLAIN, Switch((STANDARD,)), Switch((BFLOAT16,)), Switch((STANDARD, BFLOAT16))),
    "allocation": (PLAIN, Switch((), freed_memory_kept=False, title="freed memory given back")),
    "recompute": (
        PLAIN,
        Switch((STANDARD,)),
        Switch((STANDARD, "trainer.recompute=activations")),
        # Not selective, which also keeps tensors that autograd does not save.
        *(Switch((f"trainer.recompute={choice}",)) for choice in ("activations", "blocks", "sqrt")),
    ),
    "compile": (
        PLAIN,
        Switch((COMPILE,)),
        Switch((COMPILE, "trainer.accumulation_steps=3")),
        Switch((BFLOAT16,)),
        Switch((BFLOAT16, COMPILE)),
        Switch((STANDARD,)),
        Switch((STANDARD, COMPILE)),
    ),
}
