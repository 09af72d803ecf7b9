"""The switches that are measured, each against the same training without it."""

from typing import NamedTuple


class Switch(NamedTuple):
    overrides: tuple[str, ...]  # of train_seg.py
    only_cuda: bool = False
    freed_memory_kept: bool = True  # on the CPU, by engine.malloc.keep_freed_memory
    prefetched: bool = True  # by engine.loop.prefetched
    name_: str | None = None

    @property
    def name(self) -> str:
        """As the tables call it."""
        return self.name_ or " ".join(self.overrides)

    @property
    def graphs(self) -> int:
        """How many torch.compile may make: one for every size of a part of a minibatch, 8 = 3 + 3 + 2."""
        return 2 if "trainer.accumulation_steps=3" in self.overrides else 1

    @property
    def compiled(self) -> bool:
        return "trainer.compile=true" in self.overrides


DEFAULT, GIVEN_BACK, DIRECT = "default", "freed memory given back", "without prefetching"
LONG = 100_000  # steps, more than a benchmark takes

PLAIN = Switch((), name_=DEFAULT)
SWITCHES = (
    PLAIN,
    Switch(("trainer.precision=bfloat16",)),
    Switch(("trainer.precision=float16",)),
    Switch(("trainer.tf32=true",), only_cuda=True),
    Switch(("trainer.channels_last=false",)),
    Switch(("optim.fused=false",)),
    Switch((), only_cuda=True, prefetched=False, name_=DIRECT),
    Switch(("trainer.ema_decay=0.999",)),
    Switch(("optim.max_gradient_norm=1",)),
    Switch(("trainer.accumulation_steps=2",)),
    Switch(("trainer.accumulation_steps=4",)),
    Switch(("trainer.deterministic=true",)),
    Switch((f"trainer.profile={LONG}",), name_="trainer.profile, while it traces"),
)
ALLOCATION = (PLAIN, Switch((), freed_memory_kept=False, name_=GIVEN_BACK))
COMPILED = (
    PLAIN,
    Switch(("trainer.compile=true",)),
    Switch(("trainer.compile=true", "trainer.accumulation_steps=3")),
    Switch(("trainer.precision=bfloat16",)),
    Switch(("trainer.precision=bfloat16", "trainer.compile=true")),
    Switch(("norm=std",)),
    Switch(("norm=std", "trainer.compile=true")),
)
