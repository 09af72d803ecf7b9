"""What a proof finds: how far prepared steps are from the baseline's, and what they take."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..recompute.signatures.plans import Budget, checked
from ..saved import size_text

_MORE = 1.01  # a peak may be so many times the budget: allocators round
_BEYOND = 4  # prepared steps may differ by so many times the noise, of which there are four samples
_ROUNDING = 0.01  # more than this between baseline steps comes from state outside of the network
KINDS = ("outputs", "gradients", "buffers", "random")  # of a step's results


class Steps(NamedTuple):
    """Some steps from one state."""

    results: Sequence[Mapping[str, Mapping[str, Tensor]]]  # of each: kind -> name -> tensor on the CPU
    peak: int  # bytes
    seconds: float  # of the last one
    coming: int  # bytes of gradients that come during the step
    warnings: Sequence[str]
    order: Sequence[str] = ()  # names of gradients, as they come
    fits: bool = True  # in memory; otherwise what it saves was moved to the CPU
    planned: int | None = None  # bytes at the peak; None: there is no plan
    plain: int | None = None  # bytes at the baseline's peak, estimated


class Difference(NamedTuple):
    """How far tensors are from the baseline's: the norm of the difference, relative to theirs."""

    norm: float  # 0.0: equal
    noise: float  # between baseline steps
    first: str  # the first tensor that differs by more than the noise; "" if none does

    def __repr__(self) -> str:
        if self.first:
            return f"differ by {self.norm:.1e}, relative to their norm (noise: {self.noise:.1e}), first {self.first}"
        return f"within the noise: differ by {self.norm:.1e} (noise: {self.noise:.1e})" if self.norm else "equal"


class Proof(NamedTuple):
    """What a budget does to the steps of a network; print it. Bytes are counted as by `peak_bytes`."""

    outputs: Difference
    gradients: Difference  # `first`: in the order of the backward pass
    buffers: Difference
    random: Difference  # the states of random generators
    budget: int | None  # bytes; None: it is a share of a peak that is not known
    coming: int  # bytes of gradients that come during the step, which the budget leaves out
    planned: int | None  # bytes at the peak; None: there is no plan
    peak: int  # bytes
    baseline: int | None  # bytes at its peak; None: it does not fit in memory, and there is no plan
    fits: bool  # the baseline fits in memory; otherwise its peak is estimated
    time: float  # of a step, as a multiple of the baseline's
    warnings: Sequence[str]  # what is not planned, and why

    @property
    def broken(self) -> list[str]:
        """What is not as promised; empty if all is."""
        differences = {kind: getattr(self, kind) for kind in KINDS}
        is_within = self.budget is not None and self.peak <= _MORE * (self.budget + self.coming)
        checks = {
            **{kind: not one.first for kind, one in differences.items()},
            "baseline (it differs by itself)": all(one.noise <= _ROUNDING for one in differences.values()),
            "plan (there is none)": self.planned is not None,
            "peak": is_within,
        }
        return [what for what, is_kept in checks.items() if not is_kept]

    def __repr__(self) -> str:  # what notebooks and print show
        budget, planned, baseline = (
            "unknown" if size is None else size_text(size) for size in (self.budget, self.planned, self.baseline)
        )
        rows = {kind: repr(getattr(self, kind)) for kind in KINDS} | {
            "peak": f"{size_text(self.peak)} (planned: {planned}; budget: {budget}, "
            f"and {size_text(self.coming)} of gradients)",
            "baseline": baseline if self.fits else f"{baseline}, estimated: it does not fit in memory",
            "time": f"{self.time:.2f} of the baseline's",
        }
        lines = [f"{name:<10} {text}" for name, text in [*rows.items(), *(("warning", one) for one in self.warnings)]]
        return "\n".join([*lines, f"not as promised: {', '.join(self.broken)}" if self.broken else "proved"])


def proof_of(baseline: Steps, again: Steps, prepared: Steps, budget: Budget) -> Proof:
    """Compare prepared steps with the baseline's, and these with those that ran `again`."""
    plain = baseline.peak if baseline.fits else prepared.plain
    limit: float | None = checked(budget)
    if isinstance(limit, float):
        limit = None if plain is None else limit * plain
    outputs, gradients, buffers, random = (_difference(kind, baseline, again, prepared) for kind in KINDS)
    return Proof(
        outputs,
        gradients,
        buffers,
        random,
        budget=None if limit is None else int(limit),
        coming=baseline.coming,
        planned=prepared.planned,
        peak=prepared.peak,
        baseline=plain,
        fits=baseline.fits,
        time=prepared.seconds / min(baseline.seconds, again.seconds),
        warnings=[text for text in dict.fromkeys(prepared.warnings) if text not in baseline.warnings],
    )


def _difference(kind: str, baseline: Steps, again: Steps, prepared: Steps) -> Difference:
    norms, noise = _norms(kind, baseline, prepared), _norms(kind, baseline, again)
    names = [*baseline.order, *norms]
    beyond = (name for name in names if norms.get(name, 0.0) > _BEYOND * max(noise.get(name, 0.0), noise[""]))
    return Difference(norms[""], noise[""], next(beyond, ""))


def _norms(kind: str, baseline: Steps, others: Steps) -> dict[str, float]:
    """The largest relative difference of each tensor in any step, and of all together: ""."""
    norms: dict[str, float] = {}
    for results, other in zip(baseline.results, others.results, strict=True):
        names = {**results[kind], **other[kind]}
        squares = {name: _squares(results[kind].get(name), other[kind].get(name)) for name in names}
        squares[""] = sum(one for one, _ in squares.values()), sum(size for _, size in squares.values())
        for name, (difference, size) in squares.items():
            norm = math.sqrt(difference / size) if size else math.inf if difference else 0.0
            norms[name] = max(norms.get(name, 0.0), norm)
    return norms


def _squares(expected: Tensor | None, found: Tensor | None) -> tuple[float, float]:
    """Sums of the squares of the difference, and of what was expected. Infinity: they cannot be compared."""
    if expected is None or found is None or (expected.shape, expected.dtype) != (found.shape, found.dtype):
        return math.inf, 0.0
    if expected.is_complex():
        expected, found = torch.view_as_real(expected), torch.view_as_real(found)
    unequal = (expected != found) & ~(expected.isnan() & found.isnan())
    difference = float((expected[unequal].double() - found[unequal].double()).square().sum())
    size = float(expected.double().nan_to_num(0.0, 0.0, 0.0).square().sum())
    return (difference if math.isfinite(difference) else math.inf), size
