"""A seed fixes the text of a bfloat16 target on two ranks, whoever is killed: real processes, 16 streams."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import seeded_texts
from tests.support.pairs import save_good_draft, save_target

pytest.importorskip("ray")


@pytest.mark.slow
def test_no_text_differs_under_load_and_losses(tmp_path: Path) -> None:
    """The control is the benchmark's: without the flag a good part of the texts differs."""
    pair = str(save_target(tmp_path / "target")), str(save_good_draft(tmp_path / "draft"))
    found = seeded_texts.run(*pair, num_texts=32, num_tokens=64, flags=["--batch-invariant"])
    assert found.killed == list(seeded_texts.VICTIMS)
    assert found.num_texts >= 32
    assert (found.num_differing, found.num_promised) == (0, found.num_texts)
