"""What sequences teach a draft, which windows are studied when, and what tests of what was learnt decide."""

from __future__ import annotations

import random

import numpy as np
import pytest

from draft_service.lessons import (
    MAX_GRADES,
    MIN_TESTED,
    NUM_LABELS,
    WINDOW_LEN,
    Grade,
    Grades,
    Lesson,
    Window,
    Windows,
)


def labels(window: Window) -> list[tuple[int, int]]:
    """Position and token of each label."""
    first = window.start + len(window.token_ids) - window.num_labels
    return [*enumerate(window.token_ids[-window.num_labels :].tolist(), first)]


def test_each_token_of_the_target_is_a_label_once_and_no_other() -> None:
    """Whatever the rounds commit: drafts that were accepted, some of them, none; prompts are no labels."""
    generator = random.Random(1)
    for prompt_len in (1, 3, 400):
        text = [generator.randrange(50) for _ in range(prompt_len + 500)]
        handed: list[Window] = []
        lesson = Lesson(prompt_len, 0.5, handed.append)
        lesson.commit(0, text[:prompt_len])
        held = prompt_len
        while held < len(text):
            num_right = generator.randrange(4)
            base = min(held + num_right, len(text) - 1)
            drafted = [*text[held:base], 99, 99]
            lesson.commit(base, text[base : base + 1], drafted)
            if generator.random() < 0.2:  # the same request again, as after a loss
                lesson.commit(base, text[base : base + 1])
            held = base + 1
        lesson.close()
        found = [pair for window in handed for pair in labels(window)]
        assert found == [*enumerate(text)][prompt_len:]
        for window in handed:
            assert len(window.token_ids) <= WINDOW_LEN
            assert 0 < window.num_labels <= min(NUM_LABELS, len(window.token_ids) - 1)
            assert window.token_ids.tolist() == text[window.start :][: len(window.token_ids)]
            assert window.temperature == 0.5


def test_what_does_not_follow_is_left_out() -> None:
    """A request beyond what is held is refused elsewhere; one that commits nothing new adds nothing."""
    handed: list[Window] = []
    lesson = Lesson(2, 1.0, handed.append)
    lesson.commit(0, [1, 2])
    lesson.commit(9, [3, 4, 5])
    lesson.close()
    assert not handed


def window(number: int) -> Window:
    return Window(np.array([0, 0]), number, 1, 1.0)


def test_windows_are_studied_newest_first_and_again_in_between() -> None:
    windows = Windows(capacity=3, num_repeats=2)
    assert not windows
    for number in range(5):
        windows.add(window(number))
    assert len(windows) == 3, "the two oldest were dropped"
    taken = [(found.start, is_fresh) for found, is_fresh in (windows.take() for _ in range(9))]
    assert not windows, "each three times"
    assert [number for number, is_fresh in taken if is_fresh] == [4, 3, 2]
    assert sorted(number for number, is_fresh in taken if not is_fresh) == [2, 2, 3, 3, 4, 4]
    assert taken[:2] == [(4, True), (4, False)]


def test_memory_is_bounded() -> None:
    windows = Windows(capacity=4, num_repeats=3)
    for number in range(100):
        windows.add(window(number))
        windows.take()
    assert len(windows) <= 4 + 3 * 4


@pytest.mark.parametrize(("gain", "decision"), [(0.02, True), (-0.02, False), (0.0, None)])
def test_decisions(gain: float, decision: bool | None) -> None:
    """Not before enough tokens, and only where the difference is clear."""
    generator = random.Random(0)
    found = Grades()
    for number in range(40):
        noise = generator.gauss(0, 0.03)
        found.add(Grade(64, 64 * (gain + noise), 32.0))
        if (number + 1) * 64 < MIN_TESTED:
            assert found.decide() is None
    assert found.decide() is decision
    if decision is not None:
        assert found.decide() is None, "it begins anew"
    assert found.num_labels == 40 * 64


def test_agreement_before_and_now() -> None:
    """`first` stays that of the first weights once they are replaced."""
    found = Grades()
    for _ in range(20):
        found.add(Grade(64, 6.4, 16.0))
    assert (found.first_agreement, found.agreement) == (0.25, 0.25)
    assert found.decide() is True
    for _ in range(MAX_GRADES):
        found.add(Grade(64, 0.0, 48.0))
    assert (found.first_agreement, found.agreement) == (0.25, 0.75)
