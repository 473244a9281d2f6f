"""Random numbers as a pure function of (seed, stream, position, and token id or base).

The generator is Philox4x32-10 (Salmon, Moraes, Dror, Shaw 2011, "Parallel random numbers: as easy as
1, 2, 3", section 3.3). It has no state: a draw is addressed, never consumed, so a service that
restarts, a draft that is late or a batch of another shape sees the same numbers. One implementation serves
Python integers, numpy and torch, and its words agree bit for bit on every machine and device.

An address is a 64-bit key, the request's seed, and four 32-bit counter words:

    (position, low half) (position, high half) (block of token ids, or base) (stream)

Where tokens are sampled, the base, the committed length that a round begins at, is part of the address, and
no number of one round is met in another. A position that was drafted and then discarded is drafted again
later, and what was discarded may have decided something by then: under block verification how many tokens
were kept, under every rule how long the draft was at work (docs/exactness.md).

Where several tokens are drawn or judged at one position, as in chains that are drawn independently, each has
numbers of its own: the index of its chain is in the upper bits of the stream word.

Neither torch nor any device is touched at import; only a request for a torch device imports torch.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

DoubleArray = npt.NDArray[np.float64]
Integers = Sequence[int] | npt.NDArray[np.int64]
Words = tuple[Any, Any, Any, Any]
"""Four 32-bit words a lane, each held in 64 bits: int64 arrays or tensors, or packed integers."""

_MASK32 = 0xFFFFFFFF
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85
_NUM_ROUNDS = 10

_CHAIN_SHIFT = 8
"""Bits of the stream word that say what a number is for; those above have the index of a chain."""
_MAX_PACKED_LANES = 96
"""Above this many numbers numpy is faster than packed integers."""
_NUMPY_BLOCKS = 16_384
"""Blocks that numpy computes at a time: temporaries stay in the cache of a core."""
_DEVICE_BLOCKS = 1 << 24
"""Blocks that a device computes at a time: bounds temporaries to 128 MiB each."""


class Purpose(enum.IntEnum):
    """What a random number is used for. Uses at one position must never share a stream.

    The acceptance rule is exact only if its uniform number is independent of the draft token it judges, and
    the recovered token independent of both. If the draft token and its acceptance were drawn from the same
    number, acceptance would depend on *which* token was drawn, and the output would not follow the target.
    """

    DRAFT = 0
    """Sampling a draft token."""
    ACCEPT = 1
    """Accepting or rejecting it."""
    RESIDUAL = 2
    """Drawing the recovered token."""
    TARGET = 3
    """The target's own draws in verify: tail tokens and the bonus token."""
    GUMBEL = 4
    """Noise of the Gumbel coupling, shared by draft and target by design."""


def philox(counter: Words, key: tuple[Any, Any], *, mask: int = _MASK32, ones: int = 1) -> Words:
    """Philox4x32-10 on many lanes at once, each lane a 32-bit word in 64 bits.

    Lanes are the elements of int64 numpy arrays or torch tensors that broadcast together (at least
    one-dimensional: numpy warns about overflow in scalars), or the 64-bit digits of a Python integer
    of any length, where `ones` has a 1 in each digit and `mask` 32 ones.

    A product of two 32-bit words fills 64 bits. As int64 it may wrap to a negative number; its bits are
    still right, and the mask drops the copies of the sign that the arithmetic shift brings in. Words
    1 and 3 are only ever XORed, so what lies above their 32 bits is dropped one round later.

    Returns:
        Four words, in the shape the arguments broadcast to or fewer dimensions of it.
    """
    word0, word1, word2, word3 = counter
    key0, key1 = key
    weyl0, weyl1 = _WEYL[0] * ones, _WEYL[1] * ones
    for _ in range(_NUM_ROUNDS):
        product0 = word0 * _MULTIPLIERS[0]
        product1 = word2 * _MULTIPLIERS[1]
        word0 = ((product1 >> 32) ^ word1 ^ key0) & mask
        word2 = ((product0 >> 32) ^ word3 ^ key1) & mask
        word1, word3 = product1, product0
        key0 = (key0 + weyl0) & mask
        key1 = (key1 + weyl1) & mask
    return word0, word1 & mask, word2, word3 & mask


def uniform(seed: int, stream: Purpose, position: int, base: int = 0, chain: int = 0) -> float:
    """One uniform number in [0, 1) with 53 random bits; see `uniforms`."""
    counter = position & _MASK32, position >> 32, base, stream | chain << _CHAIN_SHIFT
    high, low, _, _ = philox(counter, (seed & _MASK32, seed >> 32))
    return float(((high >> 5) << 26 | (low >> 6)) * 2.0**-53)


def uniforms(
    seeds: Integers | int,
    stream: Purpose,
    positions: Integers,
    bases: Integers | int = 0,
    chains: Integers | int = 0,
) -> DoubleArray:
    """Uniform numbers in [0, 1) with 53 random bits.

    Args:
        seeds: one seed in [0, 2**63) for all, or [n].
        stream: what the numbers are used for.
        positions: [n] absolute token positions, from 0.
        bases: one base in [0, 2**32) for all, or [n].
        chains: one index of a chain in [0, 2**24) for all, or [n]; 0 where there is one chain.

    Returns:
        float64 [n].
    """
    num = len(positions)
    if num == 0:
        return np.empty(0)
    columns = np.empty((6, num), dtype=np.int64)
    columns[0], columns[1], columns[4] = seeds, positions, bases
    columns[2:4] = columns[:2] >> 32
    columns[:2] &= _MASK32
    columns[5] = chains
    columns[5] <<= _CHAIN_SHIFT
    columns[5] |= stream
    high, low = _first_words(columns)
    return np.asarray(((high >> 5) << 26 | (low >> 6)) * 2.0**-53)


def _first_words(columns: npt.NDArray[np.int64]) -> tuple[Any, Any]:
    """Words 0 and 1, int64 [n] each; `columns` [6, n]: seed and position low, then high, base and stream."""
    num = columns.shape[1]
    if num > _MAX_PACKED_LANES:
        seed_low, low, seed_high, high, base, stream = columns
        return philox((low, high, base, stream), (seed_low, seed_high))[:2]
    # A round or two needs a handful of numbers. numpy would spend a microsecond on each of over a
    # hundred operations; one long integer with a lane in every 64-bit digit does all lanes at once:
    # a 32-bit digit times a 32-bit constant never carries into the next.
    ones = int.from_bytes(b"\x01\0\0\0\0\0\0\0" * num, "little")
    lanes = (int.from_bytes(row.tobytes(), "little") for row in columns)
    seed_low, low, seed_high, high, base, stream = lanes
    words = philox((low, high, base, stream), (seed_low, seed_high), mask=ones * _MASK32, ones=ones)
    word0, word1 = (np.frombuffer(word.to_bytes(8 * num, "little"), "<i8") for word in words[:2])
    return word0, word1


def gumbel_noise(
    seeds: Integers | int, positions: Integers, vocab_size: int, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Standard Gumbel noise, -log(-log(u)), for every token id at each position.

    u lies strictly inside (0, 1): 52 random bits and a half, so that the noise spans [-3.6, 36.7] in
    steps a float64 can tell apart. With 32-bit numbers it would end at 22.9, and tokens rarer than
    about 1e-9 against the likeliest one could never win. The noise of a token depends on its id alone,
    so vocabularies padded to different sizes agree. The words under the logarithms are the same
    everywhere; the logarithms may differ in the last place between mathematics libraries.

    Args:
        seeds: one seed in [0, 2**63) for all, or [n].
        positions: [n] absolute token positions, from 0.
        vocab_size: in tokens.
        device: to compute on.

    Returns:
        float64 [n, vocab_size] on `device`, where the next call of this thread may overwrite it.
    """
    rows = np.empty((2, len(positions)), dtype=np.int64)
    rows[0], rows[1] = seeds, positions
    import torch

    if torch.device(device).type == "cpu":
        num_blocks = (vocab_size + 1) // 2
        out = np.empty((rows.shape[1], num_blocks, 2))
        _fill_gumbel(out, rows, np.arange(num_blocks), np.log, _NUMPY_BLOCKS)
        return torch.from_numpy(out.reshape(len(out), 2 * num_blocks)[:, :vocab_size])
    return _gumbel_torch(rows, vocab_size, torch.device(device))


def _gumbel_words(rows: Any, blocks: Any) -> Words:
    """Words for `rows` [2, n] (seeds, positions) and `blocks` [b]; a lane is for two token ids."""
    key, position = rows[0][:, None], rows[1][:, None]
    counter = position & _MASK32, position >> 32, blocks[None, :], int(Purpose.GUMBEL)
    return philox(counter, (key & _MASK32, key >> 32))


def _odd_53_bits(high: Any, low: Any) -> Any:
    """52 bits and a half, in units of 2**-53: an odd integer, so neither 0 nor rounded up to 2**53."""
    return (high >> 6) << 27 | (low >> 6) << 1 | 1


def _gumbel_torch(rows: npt.NDArray[np.int64], vocab_size: int, device: torch.device) -> torch.Tensor:
    from specwire.rule.captured import MOST_ELEMENTS
    from specwire.rule.transfer import to_device

    is_small = rows.shape[1] * vocab_size <= MOST_ELEMENTS
    compute = _captured_gumbel() if is_small else _gumbel_of_rows
    found: torch.Tensor = compute(to_device(np.ascontiguousarray(rows.T), device), vocab_size=vocab_size)[0]
    return found


@functools.cache
def _captured_gumbel() -> Any:
    from specwire.rule.captured import captured

    return captured(_gumbel_of_rows)


def _gumbel_of_rows(rows: torch.Tensor, *, vocab_size: int) -> tuple[torch.Tensor]:
    """Of seeds and positions, int64 [n, 2]."""
    import torch

    num_blocks = (vocab_size + 1) // 2
    out = torch.empty((len(rows), num_blocks, 2), dtype=torch.float64, device=rows.device)
    blocks = torch.arange(num_blocks, device=rows.device)
    _fill_gumbel(out, rows.T, blocks, torch.log, _DEVICE_BLOCKS)
    return (out.reshape(len(out), 2 * num_blocks)[:, :vocab_size],)


def _fill_gumbel(out: Any, rows: Any, blocks: Any, log: Any, max_blocks: int) -> None:
    """Fill `out` [n, b, 2], an array or a tensor, at most `max_blocks` Philox blocks at a time."""
    rows_at_once = max(1, max_blocks // max(1, len(blocks)))
    for row in range(0, len(out), rows_at_once):
        some_rows = slice(row, row + rows_at_once)
        for block in range(0, len(blocks), max_blocks):
            some_blocks = slice(block, block + max_blocks)
            words = _gumbel_words(rows[:, some_rows], blocks[some_blocks])
            part = out[some_rows, some_blocks]
            part[..., 0] = _odd_53_bits(words[0], words[1])
            part[..., 1] = _odd_53_bits(words[2], words[3])
            part *= 2.0**-53
            log(part, out=part)
            part *= -1.0
            log(part, out=part)
            part *= -1.0
