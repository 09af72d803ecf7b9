"""How the programs of a Triton kernel divide up a tensor (N, C, L): the tile of a step, and the number of programs."""

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

REGISTERS = 65536  # of a multiprocessor, since compute capability 7.0
MAX_PARTS = 256  # per channel; each program of pass 2 combines them

BYTES_PER_THREAD = 64  # of each tensor that a kernel reads, per tile
ACCESSES_PER_THREAD = 16  # per tile; if L is odd, each element is one access, with an address and a mask in registers
WHOLE = 128 * 14 * 14  # elements of a channel that one program sweeps twice, instead of two kernels


class Tiling(NamedTuple):
    """How the programs of a kernel divide up a tensor (N, C, L)."""

    shape: tuple[int, int, int]
    align: int  # elements: the longest vector, up to 128 bits, that divides L
    tile: tuple[int, int, int]
    num_warps: int
    resident: int  # at least this many programs run on a multiprocessor at once; see `registers`
    fold: int  # 128-bit vectors of a tile per thread, which the thread adds up
    tiles_per_part: int
    parts: int

    @property
    def registers(self) -> int:
        """Most registers per thread with which `resident` programs fit a multiprocessor; a thread has at most 255."""
        return min(255, REGISTERS // (self.resident * self.num_warps * 32) // 8 * 8)

    @property
    def blocks(self) -> int:
        """Blocks of channels."""
        return _cdiv(self.shape[1], self.tile[1])

    @property
    def padded_parts(self) -> int:
        """`parts`, rounded up to a power of four: half as many kernels to compile as with powers of two.

        With several parts and channels, it gives at least as many values as threads. With fewer, Triton converts their
        layout to the tile's only after broadcasting, which takes 50 more registers and 64 KB of shared memory.
        """
        block_c = self.tile[1]
        several = self.parts > 1 and block_c > 1
        exponent = (max(self.parts, 32 * self.num_warps // block_c if several else 1) - 1).bit_length()
        return 1 << (exponent + exponent % 2)

    def with_parts_for(self, resident_programs: int) -> "Tiling":
        """The same tiles, in parts that suit a device on which so many programs are resident."""
        tiles = _cdiv(self.shape[0], self.tile[0]) * _cdiv(self.shape[2], self.tile[2])
        least = _cdiv(tiles, MAX_PARTS)
        choices: Sequence[int]  # tiles per part
        if self.shape[2] == 1:
            # channels_last: a program combines the parts of all its channels, so more parts cost more than they gain.
            # One wave of programs is best if `blocks` divide it well; else up to four waves have smaller parts.
            parts_of_waves = [max(1, waves * resident_programs // self.blocks) for waves in (1, 2, 3, 4)]
            choices = [max(_cdiv(tiles, parts), least) for parts in parts_of_waves]
        else:
            work = tiles * self.blocks
            most = max(1, min(8, work // resident_programs), work // (4 * resident_programs))
            choices = range(max(least, most // 2), max(least, most) + 1)
        tiles_per_part = _fastest_division(choices, tiles, self.blocks, resident_programs)
        return self._replace(tiles_per_part=tiles_per_part, parts=_cdiv(tiles, tiles_per_part))


def takes_whole_channels(shape: tuple[int, int, int]) -> bool:
    """Whether one program takes whole channels, so that one kernel is a pass: 128 maps of 14x14, or as many elements.

    Its second sweep finds in the caches what the first has read: 100 KB forward and 200 KB backward in float32. Such a
    kernel takes less time than it takes to launch another. channels_last: a quarter, because a program has several
    channels.
    """
    n, _, length = shape
    return n * length <= (WHOLE if length > 1 else WHOLE // 4)


@cache
def tiling(shape: tuple[int, int, int], itemsize: int, processors: int, reads: int, whole: bool = False) -> Tiling:
    """Tiling for kernels that read `reads` tensors (N, C, L): one forward, two backward.

    `itemsize`: bytes per element. `processors`: multiprocessors of the device. `whole`: a program takes whole channels.
    """
    n, c, length = shape
    if length >= 2**31:  # kernels count the pixels of a map in 32 bits
        raise ValueError(f"backend='triton' got maps of {length} pixels: expected fewer than 2^31; use backend='eager'")
    vector = 16 // itemsize
    limits = _program_limits(length, c, itemsize, reads, whole)
    programs = limits.resident * processors
    tile = _tile(shape, vector, limits, programs, whole)
    size = math.prod(tile)
    threads = max(32, min(limits.threads, size // (limits.per_thread if whole else vector)))
    block_n, _, block_l = tile
    in_one_part = Tiling(
        shape=shape,
        align=math.gcd(length, vector),
        tile=tile,
        num_warps=threads // 32,
        resident=limits.threads // threads if whole else limits.resident,
        fold=max(1, size // (threads * vector)),
        tiles_per_part=_cdiv(n, block_n) * _cdiv(length, block_l),
        parts=1,
    )
    return in_one_part if whole else in_one_part.with_parts_for(programs)


class _Limits(NamedTuple):
    """What a program of a kernel may use."""

    threads: int  # at most
    resident: int  # programs on a multiprocessor at once
    per_thread: int  # elements of a tile
    channels: int


def _tile(
    shape: tuple[int, int, int], vector: int, limits: _Limits, programs: int, whole: bool
) -> tuple[int, int, int]:
    """The tile of a step. `vector`: elements of 128 bits. `programs`: resident on the device."""
    n, c, length = shape
    block_c = limits.channels
    # The widest tile that covers L with at most an eighth of overhang; otherwise the narrowest.
    widths = [width for width in (2048, 1024, 512, 256, 128) if width < 2 * length] or [_power_of_2(length)]
    block_l = next((width for width in widths if _cdiv(length, width) * width <= 1.125 * length), widths[-1])
    block_n = min(_power_of_2(n), max(1, limits.threads * limits.per_thread // (block_c * block_l)))
    while block_n > 1 and block_n * c * length >= 2**31:  # offsets within a tile have 32 bits
        block_n //= 2
    if length == 1 and not whole:  # four tiles per program, if each thread still gets a vector
        least_tiles = 4 * _cdiv(programs, _cdiv(c, block_c))
        while block_n * block_c > limits.threads * vector and _cdiv(n, block_n) < least_tiles:
            block_n //= 2
    return block_n, block_c, block_l


def _program_limits(length: int, c: int, itemsize: int, reads: int, whole: bool) -> _Limits:
    """The limits of a kernel's programs. Arguments as for `tiling`.

    On an H100 each multiprocessor moves 25 GB/s and waits about 0.7 us for memory, so 18 KB of requests must be in
    flight, and about twice as much with pauses for arithmetic. Resident threads request 64 bytes of each tensor: at
    least 40 KB forward, 64 KB backward (contiguous half-precision maps of odd size: half as much). Backward needs more
    registers, so fewer threads are resident.

    Contiguous (L > 1): programs of 128 threads and one channel. As tensors grow, programs first take more tiles (up to
    eight), then there are more programs (up to four times as many), then programs take more than eight tiles; or as few
    as half of them, if more of the last programs then run at the same time.
    channels_last (L = 1): one program per multiprocessor, because each combines the parts of all its channels.
    Whole channels: as many threads as a channel can use. Two sweeps need more registers, so a thread has at most 16
    elements, and forward half as many accesses. channels_last: 32 bytes of channels, the least that memory transfers.
    """
    most_threads = 1024 if reads == 1 else 512
    per_thread = BYTES_PER_THREAD // itemsize
    accesses = ACCESSES_PER_THREAD
    if whole:
        per_thread = min(per_thread, 16)
        if reads == 1:
            accesses //= 2
    if length > 1:
        per_thread = min(per_thread, accesses * math.gcd(length, 16 // itemsize))
    if whole:
        channels = 1 if length > 1 else min(_power_of_2(c), 32 // itemsize)
        return _Limits(most_threads, resident=1, per_thread=per_thread, channels=channels)
    if length > 1:
        return _Limits(threads=128, resident=5 if reads == 1 else 4, per_thread=per_thread, channels=1)
    channels = min(_power_of_2(c), 64 if itemsize == 2 and c >= 512 else 32)
    return _Limits(most_threads, resident=1, per_thread=per_thread, channels=channels)


def _fastest_division(choices: Sequence[int], tile_count: int, block_count: int, resident_programs: int) -> int:
    """The tiles per part with which a kernel finishes all blocks first, if starting a program costs as much as a tile.

    The most tiles win a tie.
    """

    def duration(tiles_per_part: int) -> int:
        """In the time for a tile: waves of programs that run after each other, times that of one program."""
        waves = _cdiv(block_count * _cdiv(tile_count, tiles_per_part), resident_programs)
        return waves * (tiles_per_part + 1)

    return min(choices, key=lambda tiles_per_part: (duration(tiles_per_part), -tiles_per_part))


def _cdiv(number: int, divisor: int) -> int:
    return -(-number // divisor)


def _power_of_2(number: int) -> int:
    """The next power of two."""
    return 1 << (number - 1).bit_length()
