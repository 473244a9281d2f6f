"""The counter-based generator: known answers, equal bits everywhere, independent streams."""

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from specwire.rule import random as sw_random
from specwire.rule.random import Purpose, gumbel_noise, philox, uniform, uniforms
from tests.support.statistics import FALSE_ALARM_RATE, chi_square_p_value

KNOWN_ANSWERS = [  # counter, key, words; from the Random123 distribution (kat_vectors, philox4x32 10)
    ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS)
def test_known_answers_in_python_numpy_and_torch(
    counter: tuple[int, int, int, int], key: tuple[int, int], words: tuple[int, int, int, int]
) -> None:
    assert philox(counter, key) == words
    for array in (np.array, torch.tensor):
        arrays: list[Any] = [tuple(array([word]) for word in given) for given in (counter, key)]
        result = philox(*arrays)
        assert tuple(int(word[0]) for word in result) == words


def test_python_numpy_and_torch_agree_on_random_words() -> None:
    lanes = np.random.default_rng(1).integers(0, 2**32, (6, 500))
    by_numpy = np.stack(philox(tuple(lanes[:4]), tuple(lanes[4:])))
    by_torch = torch.stack(philox(tuple(torch.from_numpy(lanes[:4])), tuple(torch.from_numpy(lanes[4:]))))
    by_python = np.array([philox(tuple(lane[:4]), tuple(lane[4:])) for lane in lanes.T.tolist()]).T
    assert (by_numpy == by_torch.numpy()).all()
    assert (by_numpy == by_python).all()


@pytest.mark.parametrize("num", [1, 2, 7, 96, 97, 300])
def test_vector_equals_scalar_however_it_is_computed(num: int) -> None:
    rng = np.random.default_rng(num)
    seeds = rng.integers(0, 2**63, num, dtype=np.int64).tolist()
    positions = rng.integers(0, 2**40, num).tolist()
    bases = rng.integers(0, 2**32, num).tolist()
    chains = [i % 64 for i in range(num)]
    for stream, keys in product(Purpose, ([positions], [positions, bases], [positions, bases, chains])):
        expected = [uniform(seed, stream, *each) for seed, *each in zip(seeds, *keys, strict=True)]
        assert uniforms(seeds, stream, *keys).tolist() == expected
    assert uniforms(5, Purpose.DRAFT, range(3)).tolist() == [uniform(5, Purpose.DRAFT, i) for i in range(3)]


def test_uniforms_are_pinned_so_that_seeds_keep_their_meaning() -> None:
    # word0 = 0x6627e8d5 and word1 = 0xe169c58d are the first known answer above.
    expected = ((0x6627E8D5 >> 5) * 2**26 + (0xE169C58D >> 6)) / 2**53
    assert uniform(0, Purpose.DRAFT, 0) == expected
    assert uniforms(0, Purpose.DRAFT, []).shape == (0,)


@pytest.mark.parametrize("stream", list(Purpose))
def test_uniforms_are_uniform_in_position_and_in_seed(stream: Purpose) -> None:
    """Four tests of 1,000 bins; false alarms at most FALSE_ALARM_RATE together."""
    for numbers in (
        uniforms(1234, stream, range(100_000)),
        uniforms(range(100_000), stream, [17] * 100_000),
    ):
        assert numbers.min() >= 0
        assert numbers.max() < 1
        for scaled in (numbers, numbers * 2.0**20 % 1):  # high and low bits
            counts = np.bincount((scaled * 1000).astype(int), minlength=1000)
            assert chi_square_p_value(counts, np.full(1000, 1e-3)) > FALSE_ALARM_RATE / 4


def test_streams_positions_seeds_bases_and_chains_are_independent() -> None:
    """Correlations among 12 sequences, all below 5.9 standard errors: false alarm 66 * 4e-9 < 1e-6."""
    num = 50_000
    sequences = [uniforms(77, stream, range(num)) for stream in Purpose]
    sequences += [uniforms(78, stream, range(num)) for stream in Purpose]
    sequences[-1] = uniforms(77, Purpose.DRAFT, range(1, num + 1))  # a neighbouring position
    sequences.append(uniforms(77, Purpose.DRAFT, range(num), 1))  # the base of another round
    sequences.append(uniforms(77, Purpose.DRAFT, range(num), 0, 1))  # another chain
    correlation = np.corrcoef(sequences)
    assert np.abs(correlation - np.eye(len(sequences))).max() < 5.9 / num**0.5


def test_seeds_that_differ_in_one_half_and_far_positions_differ() -> None:
    values = [uniform(s, Purpose.DRAFT, p) for s in (1, 1 + 2**32, 2**62) for p in (0, 1, 2**32, 2**32 + 1)]
    assert len(set(values)) == len(values)


def test_gumbel_noise_matches_its_definition_word_by_word() -> None:
    seed, position = 2**40 + 9, 2**33 + 5
    noise = gumbel_noise(seed, [position], 7)
    for token_id in range(7):
        counter = (position % 2**32, position >> 32, token_id // 2, Purpose.GUMBEL)
        words = philox(counter, (seed % 2**32, seed >> 32))[2 * (token_id % 2) :]
        u = ((words[0] >> 6) * 2**26 + (words[1] >> 6) + 0.5) / 2**52
        assert noise[0, token_id] == pytest.approx(-np.log(-np.log(u)), rel=1e-12)


def test_gumbel_noise_depends_on_address_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = gumbel_noise([1, 2, 3], [10, 11, 12], 1001)
    assert (gumbel_noise(2, [11], 1001)[0] == whole[1]).all()
    assert (gumbel_noise([1, 2, 3], [10, 11, 12], 500) == whole[:, :500]).all()  # padded vocabularies
    monkeypatch.setattr(sw_random, "_NUMPY_BLOCKS", 64)
    assert (gumbel_noise([1, 2, 3], [10, 11, 12], 1001) == whole).all()
    assert gumbel_noise([], [], 10).shape == (0, 10)


def test_gumbel_noise_on_torch_equals_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sw_random, "_DEVICE_BLOCKS", 100)
    rows = np.array([[3, 2**62, 4, 4], [0, 2**35, 5, 6]])
    by_numpy = gumbel_noise(rows[0], rows[1], 301)
    assert by_numpy.dtype == torch.float64
    by_torch = sw_random._gumbel_torch(rows, 301, torch.device("cpu"))
    torch.testing.assert_close(by_torch, by_numpy, rtol=1e-12, atol=1e-13)


def test_gumbel_noise_is_finite_at_both_ends() -> None:
    for word, expected in ((0, -3.6039), (0xFFFFFFFF, 36.7368)):
        units = sw_random._odd_53_bits(word, word)
        u = units * 2.0**-53
        assert 0 < u < 1
        assert units % 2 == 1
        assert -np.log(-np.log(u)) == pytest.approx(expected, abs=1e-3)


def test_gumbel_noise_follows_the_gumbel_distribution() -> None:
    noise = gumbel_noise(9, range(100), 2000).numpy().ravel()
    counts = np.bincount((np.exp(-np.exp(-noise)) * 500).astype(int), minlength=500)
    assert chi_square_p_value(counts, np.full(500, 1 / 500)) > FALSE_ALARM_RATE
