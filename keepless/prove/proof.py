"""What a proof finds: how far prepared steps are from the baseline's, and what they take."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..recompute.signatures.plans import Budget, parsed_budget
from ..units import size_text

_ALLOWANCE = 1.01  # a peak may be so many times the budget: allocators round
_NOISE_FACTOR = 4  # prepared steps may differ by so many times the noise, of which there are four samples
_ROUNDING = 0.01  # more than this between baseline steps comes from state outside of the network
KINDS = ("outputs", "gradients", "buffers", "random")  # of a step's results


class Steps(NamedTuple):
    """Some steps from one state."""

    results: Sequence[Mapping[str, Mapping[str, Tensor]]]  # of each: kind -> name -> tensor on the CPU
    peak: int  # bytes, as `peak_bytes` counts them
    seconds: float  # of the last step
    coming: int  # bytes of gradients that come during the step, which a budget leaves out
    warnings: Sequence[str]
    order: Sequence[str] = ()  # names of gradients, as they come
    fits: bool = True  # in memory; otherwise what it saves was moved to the CPU
    planned: int = 0  # bytes at the peak within a budget; 0: there is no plan
    plain: int = 0  # bytes at the baseline's peak, as the plan estimates it


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
    """What a budget does to the steps of a network; print it."""

    outputs: Difference
    gradients: Difference  # `first`: in the order of the backward pass
    buffers: Difference
    random: Difference  # the states of random generators
    budget: int  # bytes beside gradients that come; 0: it is a share of a peak that is not known
    baseline: Steps  # its peak is estimated if it does not fit in memory; 0: it is not known
    prepared: Steps  # warnings: what is not planned, and why

    @property
    def time(self) -> float:
        """Time of a prepared step, as a multiple of the baseline's."""
        return self.prepared.seconds / self.baseline.seconds

    @property
    def broken(self) -> list[str]:
        """What is not as promised; empty if all is."""
        differences = dict(zip(KINDS, (self.outputs, self.gradients, self.buffers, self.random), strict=True))
        broken = [kind for kind, difference in differences.items() if difference.first]
        if any(difference.noise > _ROUNDING for difference in differences.values()):
            broken.append("baseline (it differs by itself)")
        if not self.prepared.planned:
            broken.append("plan (there is none)")
        if self.prepared.peak > _ALLOWANCE * (self.budget + self.baseline.coming):
            broken.append("peak")
        return broken

    def __repr__(self) -> str:  # what notebooks and print show
        baseline = self.baseline
        prepared = self.prepared
        sizes = prepared.peak, prepared.planned, self.budget, baseline.coming, baseline.peak
        peak, planned, budget, coming, plain = (size_text(size) if size else "none" for size in sizes)
        rows = [
            *((kind, getattr(self, kind)) for kind in KINDS),
            ("peak", f"{peak} (planned: {planned}; budget: {budget}; beside it gradients that come: {coming})"),
            ("baseline", plain if baseline.fits else f"{plain}, estimated: it does not fit in memory"),
            ("time", f"{self.time:.2f} of the baseline's"),
            *(("warning", text) for text in prepared.warnings),
        ]
        verdict = f"not as promised: {', '.join(self.broken)}" if self.broken else "proved"
        return "\n".join([*(f"{name:<10} {text}" for name, text in rows), verdict])


def proof_of(baseline: Steps, again: Steps, prepared: Steps, budget: Budget) -> Proof:
    """Compare prepared steps with the baseline's. The noise is how far the baseline's differ when they run `again`."""
    outputs, gradients, buffers, random = (_difference(kind, baseline, again, prepared) for kind in KINDS)
    new_warnings = [text for text in dict.fromkeys(prepared.warnings) if text not in baseline.warnings]
    peak = baseline.peak if baseline.fits else prepared.plain
    seconds = min(baseline.seconds, again.seconds)
    bytes_or_share = parsed_budget(budget)
    if isinstance(bytes_or_share, int):
        budget_bytes = bytes_or_share
    else:
        budget_bytes = max(int(bytes_or_share * peak) - baseline.coming, 0)  # a share counts gradients
    return Proof(
        outputs,
        gradients,
        buffers,
        random,
        budget_bytes,
        baseline._replace(results=(), peak=peak, seconds=seconds),
        prepared._replace(results=(), warnings=new_warnings),
    )


def _difference(kind: str, baseline: Steps, again: Steps, prepared: Steps) -> Difference:
    """How far results of a kind are from the baseline's, with the first tensor that differs by more than the noise."""
    norms = _norms(kind, baseline, prepared)
    noise = _norms(kind, baseline, again)
    names = [*baseline.order, *norms]
    limits = {name: _NOISE_FACTOR * max(noise.get(name, 0.0), noise[""]) for name in names}
    first = next((name for name in names if norms.get(name, 0.0) > limits[name]), "")
    return Difference(norms[""], noise[""], first)


def _norms(kind: str, baseline: Steps, compared: Steps) -> dict[str, float]:
    """The largest relative difference of each tensor in any step, by name; of all tensors together under ""."""
    norms: dict[str, float] = {}
    for baseline_results, compared_results in zip(baseline.results, compared.results, strict=True):
        expected = baseline_results[kind]
        tensors = compared_results[kind]
        squares = {name: _squares(expected.get(name), tensors.get(name)) for name in {**expected, **tensors}}
        differences = [difference for difference, _ in squares.values()]
        sizes = [size for _, size in squares.values()]
        squares[""] = (sum(differences), sum(sizes))
        for name, (difference, size) in squares.items():
            norms[name] = max(norms.get(name, 0.0), _relative_norm(difference, size))
    return norms


def _relative_norm(difference: float, size: float) -> float:
    """The norm of a difference, relative to that of the expected tensors. Both are given as sums of squares."""
    if size:
        return math.sqrt(difference / size)
    return math.inf if difference else 0.0


def _squares(expected: Tensor | None, tensor: Tensor | None) -> tuple[float, float]:
    """Sums of the squares of the difference, and of the expected tensor. Infinity: they cannot be compared."""
    if expected is None or tensor is None or (expected.shape, expected.dtype) != (tensor.shape, tensor.dtype):
        return math.inf, 0.0
    if expected.is_complex():
        expected = torch.view_as_real(expected)
        tensor = torch.view_as_real(tensor)
    unequal = (expected != tensor) & ~(expected.isnan() & tensor.isnan())
    difference = float((expected[unequal].double() - tensor[unequal].double()).square().sum())
    size = float(expected.double().nan_to_num(0.0, 0.0, 0.0).square().sum())
    return (difference if math.isfinite(difference) else math.inf), size
