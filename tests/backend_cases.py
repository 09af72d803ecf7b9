"""Cases for the fused backends of the layers, and what they must compute: the eager backend's results in float64."""

from functools import cache, partial
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from keepless.norms.backends import compiled
from keepless.norms.backends.activations import Activation
from keepless.norms.backends.eager import EagerBackend
from keepless.norms.backends.interface import UNTRACKED, Affine, Backend, BackwardInputs

EAGER = EagerBackend()
PARAMS = {"leaky_relu": 0.01, "elu": 1.0}
# Relative to the largest term. (Triton's interpreter truncates float32 to bfloat16; a device rounds.)
TOLERANCES = {torch.float64: 4e-12, torch.float32: 4e-6, torch.bfloat16: 2**-7, torch.float16: 2**-11}


class Case(NamedTuple):
    x: Tensor
    dz: Tensor
    gamma: Tensor
    beta: Tensor
    activation: Activation

    @property
    def affine(self) -> Affine:
        return Affine(self.gamma, self.beta, self.activation)


CONTIGUOUS = torch.contiguous_format


def case(
    shape, device="cpu", dtype=torch.float32, memory_format=CONTIGUOUS, activation="leaky_relu", seed=0, param=None
) -> Case:
    """Random: x from -3 to 3, gamma with 0.3 <= |gamma| <= 0.8 and either sign, beta from -0.25 to 0.25."""
    generator = torch.Generator().manual_seed(seed)
    channels, vectors = shape[1], torch.promote_types(dtype, torch.float32)
    x = torch.randn(shape, generator=generator).clamp(-3, 3).to(device, dtype).contiguous(memory_format=memory_format)
    dz = torch.randn(shape, generator=generator).to(device, dtype).contiguous(memory_format=memory_format)
    gamma = torch.rand(channels, generator=generator) * 0.5 + 0.3
    gamma = gamma * torch.randn(channels, generator=generator).sign()
    beta = torch.rand(channels, generator=generator) * 0.5 - 0.25
    phi = Activation(activation, PARAMS.get(activation, 0.01) if param is None else param)
    return Case(x, dz, gamma.to(device, vectors), beta.to(device, vectors), phi)


def double(kept: BackwardInputs) -> BackwardInputs:
    gamma, beta, *rest = kept.affine
    tensors = kept._replace(affine=Affine(gamma.double(), beta.double(), *rest))
    return BackwardInputs(*(value.double() if isinstance(value, Tensor) else value for value in tensors))


def keep(case: Case, tensor_name: str, eps: float = 1e-5) -> BackwardInputs:
    """Return the tensors that a forward pass keeps; all are rounded to the dtypes they are kept in."""
    x, _, gamma, beta, activation = case
    z, mean, invstd = EAGER.forward(x.double(), Affine(gamma.double(), beta.double(), activation), eps, UNTRACKED)
    mean, invstd = mean.to(gamma.dtype), invstd.to(gamma.dtype)
    zero, unit_scale = torch.zeros_like(gamma), torch.ones_like(gamma)
    if tensor_name == "z":
        return BackwardInputs(z.to(x.dtype), True, beta, 1 / gamma, case.affine, invstd)
    if tensor_name == "x":
        return BackwardInputs(x, False, mean, invstd, case.affine, invstd)
    nothing = Affine(unit_scale.double(), zero.double(), Activation("identity"))
    x_hat = EAGER.normalise(x.double(), mean.double(), invstd.double(), nothing)
    return BackwardInputs(x_hat.to(x.dtype), False, zero, unit_scale, case.affine, invstd)


def assert_close(result: Tensor, wanted: Tensor, tolerance: float, scale: Tensor | float) -> None:
    error = (result.double() - wanted).abs()
    assert (error <= tolerance * scale).all(), f"{(error / scale).max():.2e} > {tolerance:.2e}"


def assert_forward(backend: Backend, case: Case) -> None:
    x, _, gamma, beta, activation = case
    unit = _unit(gamma)
    exact = Affine(gamma.double(), beta.double(), activation)
    wanted, wanted_mean, wanted_invstd = EAGER.forward(x.double(), exact, 1e-5, UNTRACKED)
    z, mean, invstd = backend.forward(x, case.affine, 1e-5, UNTRACKED)
    assert (z.dtype, z.shape, z.stride()) == (x.dtype, x.shape, x.stride())
    assert mean.dtype == invstd.dtype == gamma.dtype
    assert_close(mean, wanted_mean, 1e-6 * unit, 1.0)
    assert_close(invstd, wanted_invstd, 4e-6 * unit, wanted_invstd)
    assert_close(z, wanted, TOLERANCES[x.dtype], wanted.abs().max() + 1)
    again = backend.normalise(x, mean, invstd, case.affine)
    rounding = 1e-6 * unit if x.dtype == gamma.dtype else TOLERANCES[x.dtype]
    assert_close(again, z.double(), rounding, z.double().abs() + 1)


def assert_backward(backend: Backend, case: Case, kept: BackwardInputs, dz: Tensor | None = None) -> tuple[Tensor, ...]:
    """Errors are relative to the terms that a result sums up. Returns the gradients of x, gamma and beta."""
    dz = case.dz if dz is None else dz
    dimensions = [d for d in range(dz.dim()) if d != 1]
    size, unit = dz.double().abs(), _unit(kept.affine.gamma)
    wanted_dx, wanted_dgamma, wanted_dbeta = EAGER.backward(double(kept), dz.double())
    dx, dgamma, dbeta = backend.backward(kept, dz)
    assert (dx.dtype, dx.shape, dx.stride()) == (kept.values.dtype, kept.values.shape, kept.values.stride())
    assert_close(dbeta, wanted_dbeta, 2e-6 * unit, size.sum(dimensions))
    assert_close(dgamma, wanted_dgamma, 1e-5 * unit, size.sum(dimensions) * 4)
    scale = (kept.affine.gamma * kept.invstd).double().abs().max() * (size.max() + 1) * 2
    assert_close(dx, wanted_dx, TOLERANCES[dx.dtype], scale)
    return dx, dgamma, dbeta


def assert_pieces(backend: Backend, case: Case, kept: BackwardInputs) -> None:
    """`backward` is right, and `sums` and `input_gradient` make it up."""
    dx, dgamma, dbeta = assert_backward(backend, case, kept)
    sums = backend.sums(kept, case.dz)
    tolerance = 1e-5 * _unit(kept.affine.gamma)
    torch.testing.assert_close(sums, (dbeta, dgamma), rtol=tolerance, atol=tolerance)
    count = case.dz.numel() // case.dz.shape[1]
    pieces = backend.input_gradient(kept, case.dz, *(total / count for total in sums))
    assert_close(pieces, dx.double(), TOLERANCES[dx.dtype], dx.double().abs().max())


def run_formulas_as_they_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled backend then needs no compiler, which takes seconds for each formula."""
    monkeypatch.setattr(compiled, "_compiled", lambda formula, settings, *key: partial(formula, settings))


@cache
def need_a_compiler() -> None:
    """Skip a test where TorchInductor cannot compile. Asked of PyTorch, because what our code answers is tested."""
    try:
        torch.compile(lambda x: x + 1, dynamic=True)(torch.zeros(2, 3))
    except RuntimeError:
        pytest.skip("needs a C++ compiler")


def _unit(vectors: Tensor) -> float:
    """How much larger errors may be than the tolerances for float32: float64 has a millionth of them."""
    return 1.0 if vectors.dtype == torch.float32 else 1e-6
