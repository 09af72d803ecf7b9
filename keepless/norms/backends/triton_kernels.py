"""BN + ACT in Triton: two kernels forward and two backward, each one sweep over the pixels; small maps: one and one.

A tensor is (N, C, L) in memory: contiguous (N, C, *spatial) is (N, C, prod(spatial)), channels_last is
(N * prod(spatial), C, 1), and element (n, c, l) lies at (n * C + c) * L + l in both. All kernels walk it in tiles of
BLOCK_N x BLOCK_C x BLOCK_L elements: one channel and a run of L where L is contiguous, a run of channels where L is 1.

    forward   pass 1: x -> partials: mean and variance per part            pass 2: x, partials -> z, mean, invstd
    backward  pass 1: v, dz -> partials: sums per part                     pass 2: v, dz, partials -> dx, dgamma, dbeta

A channel's tiles are split over `parts` programs, so even a few channels can fill a device. Pass 2 has the same
programs. Each first combines the parts of its channels, always in the same order; only the program of part 0 writes
per-channel results, which no other program reads. Pass 2 walks backwards, because pass 1 left the end in the caches.
Where one program can take whole channels (`takes_whole_channels`), pass 2 makes both sweeps, and nothing is partial.

Arithmetic and vectors are float32, tensors float32, bfloat16 or float16. Division and exponential use the device's
fast instructions, accurate to a few units in the last place.
"""

# Over 400 lines: kernels and launches are read together. In order: activations, tiles and parts, sweeps, vectors,
# kernels, launches.

# Triton reads a kernel's annotations as types to compile for, so only compile-time constants have them.
# mypy: allow-untyped-defs

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...torch_internals import triton_is_interpreted
from .interface import Affine, Backend, BackwardInputs, Running
from .tilings import Tiling, takes_whole_channels, tiling

INTERPRETED = triton_is_interpreted()  # kernels then run on CPU tensors only, slowly


# ---- Activations (section 3.3), element by element: the arithmetic of .activations in float32 ----


@triton.jit
def _expm1(x):
    """exp(x) - 1, by its series near 0, where the difference would cancel (relative error below 5e-7)."""
    tail = 1 / 24 + x * (1 / 120 + x * (1 / 720 + x * (1 / 5040 + x * (1 / 40320))))
    series = 1 + x * (1 / 2 + x * (1 / 6 + x * tail))
    return tl.where(tl.abs(x) < 0.5, x * series, tl.exp(x) - 1)


@triton.jit
def _log1p(x):
    """log(1 + x); the last factor corrects the rounding of 1 + x."""
    shifted = 1 + x
    rounded = shifted - 1
    return tl.where(rounded == 0, x, tl.log(shifted) * (x / tl.where(rounded == 0, 1.0, rounded)))


@triton.jit
def _activate(y, param, ACTIVATION: tl.constexpr):
    """z = phi(y)."""
    z = y
    if ACTIVATION == "leaky_relu":
        z = tl.where(y > 0, y, y * param)
    elif ACTIVATION == "relu":
        z = tl.where(y <= 0, 0.0, y)  # NaN stays NaN
    elif ACTIVATION == "elu":
        z = tl.where(y > 0, y, param * _expm1(y))
    elif ACTIVATION == "sigmoid":
        z = 1 / (1 + tl.exp(-y))
    elif ACTIVATION == "tanh":
        minus = _expm1(-2 * tl.abs(y))
        z = tl.where(y < 0, minus, -minus) / (2 + minus)
    return z


@triton.jit
def _activation_backward(z, dz, param, ACTIVATION: tl.constexpr):
    """dL/dy from dL/dz and z = phi(y) (Algorithm 2, line 2)."""
    dy = dz
    if ACTIVATION == "leaky_relu":
        dy = tl.where(z > 0, dz, dz * param)
    elif ACTIVATION == "relu":
        dy = tl.where(z <= 0, 0.0, dz)
    elif ACTIVATION == "elu":
        dy = tl.where(z > 0, dz, dz * (z + param))
    elif ACTIVATION == "sigmoid":
        dy = dz * (1 - z) * z
    elif ACTIVATION == "tanh":
        dy = dz * (1 - z * z)
    return dy


@triton.jit
def _invert_activation(z, param, ACTIVATION: tl.constexpr, GAP: tl.constexpr):
    """y = phi^-1(z) (Algorithm 2, line 3), clamped short of asymptotes; for GAP see `invert_activation`."""
    y = z
    if ACTIVATION == "leaky_relu":
        y = tl.where(z > 0, z, z * (1 / param))
    elif ACTIVATION == "elu":
        y = tl.where(z > 0, z, _log1p(tl.maximum(z * (1 / param), GAP - 1)))
    elif ACTIVATION == "sigmoid":
        inside = tl.minimum(tl.maximum(z, GAP * GAP), 1 - GAP)
        y = tl.log(inside / (1 - inside))
    elif ACTIVATION == "tanh":
        size = tl.minimum(tl.abs(z), 1 - GAP)
        y = 0.5 * _log1p(2 * size / (1 - size))
        y = tl.where(z < 0, -y, y)
    return y


# ---- Tiles and parts ----


@triton.jit
def _tile(tile, block, N, C, L, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_L: tl.constexpr):
    """First element of a tile of a block of channels, and (BLOCK_N, BLOCK_C, BLOCK_L) offsets from it and mask.

    Only the first element needs 64 bits. Kept apart from the offsets, it is all that changes from tile to tile.
    """
    tiles_l = (L + BLOCK_L - 1) // BLOCK_L
    n = tile // tiles_l * BLOCK_N
    c = block * BLOCK_C
    l = tile % tiles_l * BLOCK_L  # noqa: E741
    in_n = tl.arange(0, BLOCK_N)[:, None, None]
    in_c = tl.arange(0, BLOCK_C)[None, :, None]
    in_l = tl.arange(0, BLOCK_L)[None, None, :]
    start = (n.to(tl.int64) * C + c) * L + l
    return start, (in_n * C + in_c) * L + in_l, (n + in_n < N) & (c + in_c < C) & (l + in_l < L)


@triton.jit
def _tiles(N, L, BLOCK_N: tl.constexpr, BLOCK_L: tl.constexpr):
    """Tiles of a block of channels."""
    return (N + BLOCK_N - 1) // BLOCK_N * ((L + BLOCK_L - 1) // BLOCK_L)


@triton.jit
def _part(part, tiles_per_part, N, L, BLOCK_N: tl.constexpr, BLOCK_L: tl.constexpr):
    """First tile of a part, and one past its last. Empty for parts past the end."""
    tiles = _tiles(N, L, BLOCK_N, BLOCK_L)
    return tl.minimum(part * tiles_per_part, tiles), tl.minimum((part + 1) * tiles_per_part, tiles)


@triton.jit
def _elements(first, end, N, L, BLOCK_N: tl.constexpr, BLOCK_L: tl.constexpr):
    """Elements of one channel in tiles first … end - 1, as float32."""
    before = _elements_before(first, N, L, BLOCK_N, BLOCK_L)
    return (_elements_before(end, N, L, BLOCK_N, BLOCK_L) - before).to(tl.float32)


@triton.jit
def _elements_before(tile, N, L, BLOCK_N: tl.constexpr, BLOCK_L: tl.constexpr):
    """Elements of one channel in the tiles before this one, as int64: whole rows of tiles, then a partial row."""
    tiles_l = (L + BLOCK_L - 1) // BLOCK_L
    n = tl.minimum(tile // tiles_l * BLOCK_N, N)
    return n.to(tl.int64) * L + tl.minimum(N - n, BLOCK_N).to(tl.int64) * (tile % tiles_l * BLOCK_L)


@triton.jit
def _count(N, L):
    """Elements of a channel, as float32."""
    return (N.to(tl.int64) * L).to(tl.float32)


@triton.jit
def _fold(values, FOLD: tl.constexpr):
    """Add up the elements of a tile that one thread holds: FOLD times fewer remain, with channels still innermost.

    A thread's 128-bit pieces lie far apart in the flat tile, so the sum is over the slowest index.
    """
    return tl.sum(tl.reshape(values, (FOLD, values.numel // FOLD)), axis=0)


@triton.jit
def _sum(values, BLOCK_C: tl.constexpr):
    """Sum over all indices but channels, the last, in the shape of `_channels`."""
    if BLOCK_C == 1:
        sums = tl.sum(tl.reshape(values, (values.numel,)))
    else:
        sums = tl.sum(tl.reshape(values, (values.numel // BLOCK_C, BLOCK_C)), axis=0)[None, :, None]
    return sums


@triton.jit
def _channels(block, BLOCK_C: tl.constexpr):
    """Channels of a block, (1, BLOCK_C, 1); a single one is a scalar, in one register instead of one per element."""
    channels = block * BLOCK_C
    if BLOCK_C > 1:
        channels += tl.arange(0, BLOCK_C)[None, :, None]
    return channels


@triton.jit
def _place(program, C, BLOCK_C: tl.constexpr):
    """A program's block of channels, its part of their tiles, the channels, and which of them exist."""
    blocks = (C + BLOCK_C - 1) // BLOCK_C
    block = program % blocks
    channels = _channels(block, BLOCK_C)
    return block, program // blocks, channels, channels < C


@triton.jit
def _load_gamma(gamma, channels, exists, floor):
    """copysign(max(|gamma|, floor), gamma); NaN stays NaN."""
    gamma = tl.load(gamma + channels, exists, 1.0)
    least = tl.where(gamma.to(tl.int32, bitcast=True) < 0, -floor, floor)
    return tl.where(tl.abs(gamma) < floor, least, gamma)


@triton.jit
def _load_partials(partials, parts, channels, C, PARTS: tl.constexpr):
    """Both partial results (2, parts, C) for channels (1, BLOCK_C, 1): two (PARTS, BLOCK_C, 1), zero past the end."""
    part = tl.arange(0, PARTS)[:, None, None]
    offsets = part * C + channels
    mask = (part < parts) & (channels < C)
    return tl.load(partials + offsets, mask, 0.0), tl.load(partials + parts * C + offsets, mask, 0.0)


@triton.jit
def _combine_moments(
    partials, parts, channels, tiles_per_part, N, C, L,
    BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_L: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Mean and biased variance of whole channels, from their parts (Chan, Golub and LeVeque 1979)."""
    means, variances = _load_partials(partials, parts, channels, C, PARTS)
    first, end = _part(tl.arange(0, PARTS)[:, None, None], tiles_per_part, N, L, BLOCK_N, BLOCK_L)
    weights = _elements(first, end, N, L, BLOCK_N, BLOCK_L) / _count(N, L)
    mean = _sum(weights * means, BLOCK_C)
    apart = means - mean
    return mean, _sum(weights * (variances + apart * apart), BLOCK_C)


# ---- Sweeps over the tiles first … end - 1 of a block of channels ----


@triton.jit
def _sweep_moments(
    x, block, first, end, N, C, L,
    BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_L: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    """Mean and biased variance. Traffic: 1 read of x.

    Sums are taken of x - shift, where shift is the mean of the first tile. Whatever the channel's mean, cancellation
    then costs at most a factor of the number of tiles.
    """
    start, offsets, mask = _tile(first, block, N, C, L, BLOCK_N, BLOCK_C, BLOCK_L)
    values = tl.load(x + start + offsets, mask, 0.0).to(tl.float32)
    shift = _sum(_fold(values, FOLD), BLOCK_C) / _elements(first, first + 1, N, L, BLOCK_N, BLOCK_L)
    rounded = shift.to(x.dtype.element_ty)  # representable in x: masked loads return it, so they add nothing
    shift = rounded.to(tl.float32)
    values = tl.where(mask, values - shift, 0.0)
    sums = _fold(values, FOLD)
    squares = _fold(values * values, FOLD)
    for tile in range(first + 1, end):
        start, offsets, mask = _tile(tile, block, N, C, L, BLOCK_N, BLOCK_C, BLOCK_L)
        values = tl.load(x + start + offsets, mask, rounded).to(tl.float32) - shift
        sums += _fold(values, FOLD)
        squares += _fold(values * values, FOLD)

    count = _elements(first, end, N, L, BLOCK_N, BLOCK_L)
    mean = _sum(sums, BLOCK_C) / count
    var = _sum(squares, BLOCK_C) / count - mean * mean
    return shift + mean, tl.where(var < 0, 0.0, var)  # NaN stays NaN


@triton.jit
def _sweep_output(
    x, z, block, first, end, centre, scale, shift, param, N, C, L,
    ACTIVATION: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    """z = phi((x - centre) * scale + shift), from the last tile to the first. Traffic: 1 read of x, 1 write of z."""
    for step in range(first, end):
        start, offsets, mask = _tile(first + end - 1 - step, block, N, C, L, BLOCK_N, BLOCK_C, BLOCK_L)
        values = tl.load(x + start + offsets, mask, 0.0, eviction_policy="evict_first").to(tl.float32)
        values = _activate((values - centre) * scale + shift, param, ACTIVATION)
        tl.store(z + start + offsets, values.to(z.dtype.element_ty), mask)


@triton.jit
def _x_hat_and_dy(
    values, dz, vectors, param,
    ACTIVATION: tl.constexpr, IS_OUTPUT: tl.constexpr, GAP: tl.constexpr,
):  # fmt: skip
    """x_hat and dL/dy from the values of `BackwardInputs` and dL/dz, all float32. `vectors`: see `_load_vectors`."""
    offset, factor, gamma, beta = vectors
    if IS_OUTPUT:
        z = values
        x_hat = (_invert_activation(z, param, ACTIVATION, GAP) - offset) * factor
    else:
        x_hat = (values - offset) * factor
        z = _activate(gamma * x_hat + beta, param, ACTIVATION)
    return x_hat, _activation_backward(z, dz, param, ACTIVATION)


@triton.jit
def _sweep_sums(
    kept, dz, block, first, end, vectors, param, N, C, L,
    ACTIVATION: tl.constexpr, IS_OUTPUT: tl.constexpr, GAP: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_L: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    """Sums of dL/dy and of dL/dy * x_hat. Traffic: 1 read of kept, 1 of dz."""
    sum_dy = tl.zeros((BLOCK_N * BLOCK_C * BLOCK_L // FOLD,), tl.float32)
    sum_dy_x_hat = tl.zeros((BLOCK_N * BLOCK_C * BLOCK_L // FOLD,), tl.float32)
    for tile in range(first, end):
        start, offsets, mask = _tile(tile, block, N, C, L, BLOCK_N, BLOCK_C, BLOCK_L)
        values = tl.load(kept + start + offsets, mask, 0.0).to(tl.float32)
        gradient = tl.load(dz + start + offsets, mask, 0.0).to(tl.float32)  # zero where masked, and so is dy
        x_hat, dy = _x_hat_and_dy(values, gradient, vectors, param, ACTIVATION, IS_OUTPUT, GAP)
        sum_dy += _fold(dy, FOLD)
        sum_dy_x_hat += _fold(dy * x_hat, FOLD)
    return _sum(sum_dy, BLOCK_C), _sum(sum_dy_x_hat, BLOCK_C)


@triton.jit
def _sweep_gradient(
    kept, dz, dx, block, first, end, vectors, scale, mean_dy, mean_dy_x_hat, param, N, C, L,
    ACTIVATION: tl.constexpr, IS_OUTPUT: tl.constexpr, GAP: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    """dx = scale * (dL/dy - mean_dy - x_hat * mean_dy_x_hat), from the last tile to the first.

    Traffic: 1 read of kept, 1 of dz, 1 write of dx.
    """
    for step in range(first, end):
        start, offsets, mask = _tile(first + end - 1 - step, block, N, C, L, BLOCK_N, BLOCK_C, BLOCK_L)
        values = tl.load(kept + start + offsets, mask, 0.0, eviction_policy="evict_first").to(tl.float32)
        gradient = tl.load(dz + start + offsets, mask, 0.0, eviction_policy="evict_first").to(tl.float32)
        x_hat, dy = _x_hat_and_dy(values, gradient, vectors, param, ACTIVATION, IS_OUTPUT, GAP)
        tl.store(dx + start + offsets, (scale * (dy - mean_dy - x_hat * mean_dy_x_hat)).to(dx.dtype.element_ty), mask)


# ---- Vectors ----


@triton.jit
def _write_statistics(
    centre, var, unbiased, mean, invstd, running_mean, running_var, momentum, eps, channels, exists
):  # fmt: skip
    """Write mean, invstd and the running statistics, if given, of a block of channels."""
    tl.store(mean + channels, centre, exists)
    tl.store(invstd + channels, tl.rsqrt(var + eps), exists)
    if running_mean is not None:
        old_mean = tl.load(running_mean + channels, exists, 0.0)
        old_var = tl.load(running_var + channels, exists, 0.0)
        # Exact for momentum 1, unlike old + momentum * (new - old).
        tl.store(running_mean + channels, (1 - momentum) * old_mean + momentum * centre, exists)
        tl.store(running_var + channels, (1 - momentum) * old_var + momentum * unbiased, exists)


@triton.jit
def _load_vectors(offset, factor, gamma, beta, floor, channels, exists):
    """offset, factor, floored gamma and beta of `BackwardInputs`, of a block of channels."""
    gamma = _load_gamma(gamma, channels, exists, floor)
    beta = tl.load(beta + channels, exists, 0.0)
    offset = tl.load(offset + channels, exists, 0.0)
    if factor is None:
        factor = tl.div_rn(1.0, gamma)
    else:
        factor = tl.load(factor + channels, exists, 0.0)
    return offset, factor, gamma, beta


# ---- Kernels, on a tensor (N, C, L) with L = length * ALIGN ----
# SUMS: how pass 2 gets the sums over channels: "given", from "parts", or by its own sweep over "whole" channels.

_kernel = triton.jit(do_not_specialize=["N", "tiles_per_part", "parts"])  # no recompilation for N = 1, 16, …


@_kernel
def _partial_moments_kernel(
    x, partials, N, C, length, tiles_per_part, parts,
    ALIGN: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_L: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    """partials (2, parts, C): mean and biased variance."""
    L = length * ALIGN
    block, part, channels, exists = _place(tl.program_id(0), C, BLOCK_C)
    first, end = _part(part, tiles_per_part, N, L, BLOCK_N, BLOCK_L)
    mean, var = _sweep_moments(x, block, first, end, N, C, L, BLOCK_N, BLOCK_C, BLOCK_L, FOLD)
    tl.store(partials + part * C + channels, mean, exists)
    tl.store(partials + (parts + part) * C + channels, var, exists)


@_kernel
def _moments_kernel(
    partials, mean, var, N, C, length, tiles_per_part, parts,
    ALIGN: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_L: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Mean and biased variance (C,) of whole channels; one program per block of channels. Traffic: 2 * parts * C."""
    channels = _channels(tl.program_id(0), BLOCK_C)
    L = length * ALIGN
    whole = _combine_moments(partials, parts, channels, tiles_per_part, N, C, L, BLOCK_N, BLOCK_C, BLOCK_L, PARTS)
    tl.store(mean + channels, whole[0], channels < C)
    tl.store(var + channels, whole[1], channels < C)


@triton.jit(do_not_specialize=["ranks"])
def _joint_statistics_kernel(
    gathered, total, mean, invstd, running_mean, running_var, momentum, eps, C, ranks, BLOCK: tl.constexpr
):  # fmt: skip
    """See `Backend.joint_statistics`; arithmetic in float64. One program per block of channels."""
    channels = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = channels < C
    count = tl.full((), 0.0, tl.float64)
    weighted = tl.zeros((BLOCK,), tl.float64)
    for rank in range(ranks):
        row = gathered + rank * (2 * C + 1)
        values = tl.load(row + 2 * C)
        count += values
        weighted += values * tl.load(row + channels, exists, 0.0)
    centre = weighted / count
    deviations = tl.zeros((BLOCK,), tl.float64)
    for rank in range(ranks):
        row = gathered + rank * (2 * C + 1)
        distance = tl.load(row + channels, exists, 0.0) - centre
        deviations += tl.load(row + 2 * C) * (tl.load(row + C + channels, exists, 0.0) + distance * distance)
    var = deviations / count
    unbiased = (var * (count / (count - 1))).to(tl.float32)
    _write_statistics(
        centre.to(tl.float32), var.to(tl.float32), unbiased,
        mean, invstd, running_mean, running_var, momentum, eps, channels, exists,
    )  # fmt: skip
    if tl.program_id(0) == 0:
        tl.store(total, tl.where(count >= 2, count, 0.0))


@_kernel
def _normalise_kernel(
    x, z, mean, invstd, gamma, beta, partials, running_mean, running_var, momentum, eps, floor, param,
    N, C, length, tiles_per_part, parts,
    ACTIVATION: tl.constexpr, SUMS: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_L: tl.constexpr, FOLD: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """z = phi(gamma * (x - mean) * invstd + beta).

    Unless SUMS is "given", mean and invstd are outputs, and so are the running statistics, if given.
    """
    L = length * ALIGN
    block, part, channels, exists = _place(tl.num_programs(0) - 1 - tl.program_id(0), C, BLOCK_C)
    first, end = _part(part, tiles_per_part, N, L, BLOCK_N, BLOCK_L)
    if SUMS == "given":
        centre = tl.load(mean + channels, exists, 0.0)
        scale = tl.load(invstd + channels, exists, 0.0)
    else:
        if SUMS == "whole":
            centre, var = _sweep_moments(x, block, first, end, N, C, L, BLOCK_N, BLOCK_C, BLOCK_L, FOLD)
        else:
            centre, var = _combine_moments(
                partials, parts, channels, tiles_per_part, N, C, L, BLOCK_N, BLOCK_C, BLOCK_L, PARTS
            )
        scale = tl.rsqrt(var + eps)
        if part == 0:
            unbiased = var * (_count(N, L) / (_count(N, L) - 1))
            _write_statistics(
                centre, var, unbiased, mean, invstd, running_mean, running_var, momentum, eps, channels, exists
            )
    scale *= _load_gamma(gamma, channels, exists, floor)
    shift = tl.load(beta + channels, exists, 0.0)
    _sweep_output(x, z, block, first, end, centre, scale, shift, param, N, C, L, ACTIVATION, BLOCK_N, BLOCK_C, BLOCK_L)


@_kernel
def _partial_sums_kernel(
    kept, dz, offset, factor, gamma, beta, partials, floor, param, N, C, length, tiles_per_part, parts,
    ACTIVATION: tl.constexpr, IS_OUTPUT: tl.constexpr, GAP: tl.constexpr,
    ALIGN: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_L: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    """partials (2, parts, C): sums of dL/dy and of dL/dy * x_hat."""
    L = length * ALIGN
    block, part, channels, exists = _place(tl.program_id(0), C, BLOCK_C)
    vectors = _load_vectors(offset, factor, gamma, beta, floor, channels, exists)
    first, end = _part(part, tiles_per_part, N, L, BLOCK_N, BLOCK_L)
    sum_dy, sum_dy_x_hat = _sweep_sums(
        kept, dz, block, first, end, vectors, param, N, C, L,
        ACTIVATION, IS_OUTPUT, GAP, BLOCK_N, BLOCK_C, BLOCK_L, FOLD,
    )  # fmt: skip
    tl.store(partials + part * C + channels, sum_dy, exists)
    tl.store(partials + (parts + part) * C + channels, sum_dy_x_hat, exists)


@_kernel
def _input_gradient_kernel(
    kept, dz, dx, offset, factor, gamma, beta, invstd, mean_dy, mean_dy_x_hat, partials, dbeta, dgamma, floor, param,
    N, C, length, tiles_per_part, parts,
    ACTIVATION: tl.constexpr, IS_OUTPUT: tl.constexpr, GAP: tl.constexpr, SUMS: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_L: tl.constexpr, FOLD: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """dx = gamma * invstd * (dL/dy - mean_dy - x_hat * mean_dy_x_hat).

    Unless SUMS is "given", the means are computed, and dbeta and dgamma are outputs.
    """
    L = length * ALIGN
    block, part, channels, exists = _place(tl.num_programs(0) - 1 - tl.program_id(0), C, BLOCK_C)
    vectors = _load_vectors(offset, factor, gamma, beta, floor, channels, exists)
    first, end = _part(part, tiles_per_part, N, L, BLOCK_N, BLOCK_L)
    if SUMS == "given":
        mean_dy = tl.load(mean_dy + channels, exists, 0.0)
        mean_dy_x_hat = tl.load(mean_dy_x_hat + channels, exists, 0.0)
    else:
        if SUMS == "whole":
            sum_dy, sum_dy_x_hat = _sweep_sums(
                kept, dz, block, first, end, vectors, param, N, C, L,
                ACTIVATION, IS_OUTPUT, GAP, BLOCK_N, BLOCK_C, BLOCK_L, FOLD,
            )  # fmt: skip
        else:
            sums_dy, sums_dy_x_hat = _load_partials(partials, parts, channels, C, PARTS)
            sum_dy = _sum(sums_dy, BLOCK_C)
            sum_dy_x_hat = _sum(sums_dy_x_hat, BLOCK_C)
        if part == 0:
            tl.store(dbeta + channels, sum_dy, exists)
            tl.store(dgamma + channels, sum_dy_x_hat, exists)
        count = _count(N, L)
        mean_dy = sum_dy / count
        mean_dy_x_hat = sum_dy_x_hat / count
    scale = vectors[2] * tl.load(invstd + channels, exists, 0.0)
    _sweep_gradient(
        kept, dz, dx, block, first, end, vectors, scale, mean_dy, mean_dy_x_hat, param, N, C, L,
        ACTIVATION, IS_OUTPUT, GAP, BLOCK_N, BLOCK_C, BLOCK_L,
    )  # fmt: skip


# ---- Launches ----

Key = tuple[torch.Size, bool, torch.dtype, torch.device]  # of a tensor; launches are prepared for each key


def _key(x: Tensor) -> Key:
    """Shape, whether contiguous (or else channels_last), dtype and device."""
    return x.shape, x.is_contiguous(), x.dtype, x.device


@dataclass(slots=True)
class Launch:
    """A kernel, with its arguments except tensors and floats. It is for one device."""

    kernel: Any
    programs: int
    sizes: tuple[int, ...]
    constants: dict[str, Any]  # compile-time constants
    options: dict[str, Any]  # of compilation, e.g. num_warps
    parts: int = 1  # of each channel, which its programs divide up
    # Launchers of compiled kernels, by what these were compiled for: the tensors' alignment (None: no tensor). Triton
    # would look at all arguments to find them, which takes several times as long as the launch.
    compiled: dict[tuple[int | None, ...], Callable[..., None]] = field(default_factory=dict)

    def __call__(self, tensors: tuple[Tensor | None, ...], floats: tuple[float, ...] = ()) -> None:
        """Launch the kernel on the current stream of the first tensor's device. The first is not None."""
        first = tensors[0]
        assert first is not None
        if first.is_cuda and first.get_device() != torch.cuda.current_device():
            with torch.cuda.device_of(first):
                return self(tensors, floats)
        alignment = tuple([None if tensor is None else tensor.data_ptr() % 16 for tensor in tensors])
        launch = self.compiled.get(alignment)
        if launch is not None:
            return launch(*tensors, *floats, *self.sizes, *self.constants.values())
        grid = (self.programs, 1, 1)
        compiled = self.kernel[grid](*tensors, *floats, *self.sizes, **self.constants, **self.options)
        if compiled is not None:  # it is None where kernels are interpreted
            self.compiled[alignment] = compiled[grid]


@cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def _tiling(key: Key, reads: int, sums: bool = True) -> Tiling:
    """`sums`: whether a kernel sums over channels; one program then takes whole channels, if it can."""
    shape, contiguous, dtype, device = key
    n, c, *spatial = shape
    length = math.prod(spatial)
    packed = (n, c, length) if contiguous else (n * length, c, 1)
    return tiling(packed, dtype.itemsize, _processors(device), reads, sums and takes_whole_channels(packed))


@cache
def _partial_moments(key: Key) -> Launch:
    return _launch(_partial_moments_kernel, key, reads=1)


@cache
def _moments(key: Key) -> Launch:
    launch = _launch(_moments_kernel, key, reads=1)
    return replace(launch, programs=launch.programs // launch.parts)


@cache
def _normalise(key: Key, activation: str, is_given: bool) -> Launch:
    return _launch(_normalise_kernel, key, reads=1, is_given=is_given, ACTIVATION=activation)


@cache
def _partial_sums(key: Key, activation: str, is_output: bool) -> Launch:
    return _launch(_partial_sums_kernel, key, reads=2, ACTIVATION=activation, IS_OUTPUT=is_output)


@cache
def _input_gradient(key: Key, activation: str, is_output: bool, is_given: bool) -> Launch:
    constants = {"ACTIVATION": activation, "IS_OUTPUT": is_output}
    return _launch(_input_gradient_kernel, key, reads=2, is_given=is_given, **constants)


def _launch(kernel: Any, key: Key, reads: int, is_given: bool = False, **constants: Any) -> Launch:
    """Prepare a kernel of a pass that reads so many tensors: one program per block of channels and part.

    `is_given`: it needs no sums over channels, and so no parts: it is compiled once for all numbers of them.
    `constants`: besides those of every pass.
    """
    tiling = _tiling(key, reads, sums=not is_given)
    n, c, length = tiling.shape
    sums = "whole" if tiling.parts == 1 else "parts"
    constants |= dict(zip(("BLOCK_N", "BLOCK_C", "BLOCK_L"), tiling.tile, strict=True))
    constants |= {"ALIGN": tiling.align, "FOLD": tiling.fold, "GAP": torch.finfo(key[2]).eps / 2}
    constants |= {"SUMS": "given", "PARTS": 1} if is_given else {"SUMS": sums, "PARTS": tiling.padded_parts}
    return Launch(
        kernel,
        programs=tiling.blocks * tiling.parts,
        sizes=(n, c, length // tiling.align, tiling.tiles_per_part, tiling.parts),
        constants={name: constants[name] for name in kernel.arg_names if name in constants},
        # A program that has a multiprocessor to itself fits anyway.
        options={"num_warps": tiling.num_warps, "maxnreg": tiling.registers if tiling.resident > 1 else None},
        parts=tiling.parts,
    )


@cache
def _joint_statistics_launch(channels: int, ranks: int, device: torch.device) -> Launch:
    return Launch(_joint_statistics_kernel, triton.cdiv(channels, 128), (channels, ranks), {"BLOCK": 128}, {})


def supports(x: Tensor) -> bool:
    """Whether the kernels support the device and dtype of a tensor."""
    device = "cpu" if INTERPRETED else "cuda"
    return x.device.type == device and x.dtype in (torch.float32, torch.bfloat16, torch.float16)


def launch_small_kernel(device: torch.device) -> None:
    """Launch a small kernel. Raises whatever Triton raises if it cannot, e.g. without a C compiler."""
    TritonBackend().moments(torch.zeros(1, 1, 2, device=device))


class TritonBackend(Backend):
    """float32, bfloat16 and float16 tensors on a CUDA device; vectors float32."""

    floors_gamma = True

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        key = _key(x)
        launch = _partial_moments(key)
        partials = x.new_empty(2 * launch.parts * x.shape[1], dtype=torch.float32)
        launch((x, partials))
        if launch.parts == 1:
            mean, var = partials.view(2, -1)
        else:
            mean, var = partials.new_empty((2, x.shape[1]))
            _moments(key)((partials, mean, var))
        return mean, var

    def joint_statistics(
        self, gathered: Tensor, dtype: torch.dtype, eps: float, running: Running
    ) -> tuple[Tensor, Tensor, Tensor]:
        if not _are_contiguous(running):
            return super().joint_statistics(gathered, dtype, eps, running)
        running_mean, running_var, momentum = running
        ranks = gathered.shape[0]
        channels = gathered.shape[1] // 2
        mean, invstd = (gathered.new_empty(channels, dtype=dtype) for _ in range(2))
        total = gathered.new_empty(())
        tensors = (gathered, total, mean, invstd, running_mean, running_var)
        _joint_statistics_launch(channels, ranks, gathered.device)(tensors, (float(momentum), float(eps)))
        return mean, invstd, total

    def normalise(self, x: Tensor, mean: Tensor, invstd: Tensor, affine: Affine, overwrite: bool = False) -> Tensor:
        gamma, beta, activation, floor = affine
        z = x if overwrite else torch.empty_like(x)
        floats = (0.0, 0.0, floor, float(activation.param))
        _normalise(_key(x), activation.name, True)((x, z, mean, invstd, gamma, beta, None, None, None), floats)
        return z

    def forward(
        self, x: Tensor, affine: Affine, eps: float, running: Running, overwrite: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        if not _are_contiguous(running):
            return super().forward(x, affine, eps, running, overwrite)
        running_mean, running_var, momentum = running
        gamma, beta, activation, floor = affine
        key = _key(x)
        launch = _normalise(key, activation.name, False)
        mean = torch.empty_like(beta)
        invstd = torch.empty_like(beta)  # of its own storage: the mean may be freed first
        z = x if overwrite else torch.empty_like(x)
        floats = (float(momentum), float(eps), floor, float(activation.param))
        partials = None if launch.parts == 1 else _partial_results(_partial_moments(key), beta, (x,))
        launch((x, z, mean, invstd, gamma, beta, partials, running_mean, running_var), floats)
        return z, mean, invstd

    def sums(self, kept: BackwardInputs, dz: Tensor) -> tuple[Tensor, Tensor]:
        partials = _partial_results_of_sums(kept, _in_format_of(kept.values, dz))
        parts = partials.view(2, -1, len(kept.affine.beta))
        dbeta, dgamma = parts[:, 0] if parts.shape[1] == 1 else parts.sum(1)
        return dbeta, dgamma

    def input_gradient(self, kept: BackwardInputs, dz: Tensor, mean_dy: Tensor, mean_dy_x_hat: Tensor) -> Tensor:
        launch = _input_gradient(_key(kept.values), kept.affine.activation.name, kept.is_output, True)
        dx = torch.empty_like(kept.values)
        vectors = (*_vectors(kept), kept.invstd, mean_dy, mean_dy_x_hat, None, None, None)
        launch((kept.values, _in_format_of(kept.values, dz), dx, *vectors), _floats(kept))
        return dx

    def backward(self, kept: BackwardInputs, dz: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        launch = _input_gradient(_key(kept.values), kept.affine.activation.name, kept.is_output, False)
        dz = _in_format_of(kept.values, dz)
        dx = torch.empty_like(kept.values)
        dgamma = torch.empty_like(kept.affine.beta)
        dbeta = torch.empty_like(kept.affine.beta)
        partials = None if launch.parts == 1 else _partial_results_of_sums(kept, dz)
        vectors = (*_vectors(kept), kept.invstd, None, None, partials, dbeta, dgamma)
        launch((kept.values, dz, dx, *vectors), _floats(kept))
        return dx, dgamma, dbeta


def _are_contiguous(running: Running) -> bool:
    """Whether running statistics, if tracked, are contiguous: kernels take no strides of vectors."""
    return all(statistic is None or statistic.is_contiguous() for statistic in (running.mean, running.var))


def _partial_results_of_sums(kept: BackwardInputs, dz: Tensor) -> Tensor:
    launch = _partial_sums(_key(kept.values), kept.affine.activation.name, kept.is_output)
    return _partial_results(launch, kept.affine.beta, (kept.values, dz, *_vectors(kept)), _floats(kept))


def _partial_results(
    launch: Launch, like: Tensor, tensors: tuple[Tensor | None, ...], floats: tuple[float, ...] = ()
) -> Tensor:
    """What a kernel writes for each part, (2, parts, C), flat. `like`: a vector (C,)."""
    partials = like.new_empty(2 * launch.parts * len(like))
    launch((*tensors, partials), floats)
    return partials


def _vectors(kept: BackwardInputs) -> tuple[Tensor | None, ...]:
    """The arguments of `_load_vectors`."""
    return kept.offset, kept.factor, kept.affine.gamma, kept.affine.beta


def _floats(kept: BackwardInputs) -> tuple[float, float]:
    return kept.affine.floor, float(kept.affine.activation.param)


def _in_format_of(values: Tensor, dz: Tensor) -> Tensor:
    """dz in the memory format of `values`, copied only if it differs."""
    has_format = dz.is_contiguous() if values.is_contiguous() else dz.movedim(1, -1).is_contiguous()
    return dz if has_format else torch.empty_like(values).copy_(dz)
