"""Jobs of a draft whose vocabulary is not the target's: what stays computed, and what logits become."""

from __future__ import annotations

import pytest
import torch

from draft_service.drafter import DraftJob
from draft_service.scores import SharedScores
from draft_service.strings import StringJob
from draft_service.translation import Transcript
from draft_service.vocabulary import SharedVocabulary
from specwire import Rule, SamplingParams
from specwire.core import Proposal
from specwire.engine.cache.kv_cache import PagePool
from specwire.engine.drawn import Drawn
from specwire.engine.jobs import TokenSequence
from tests.support import vocabularies


@pytest.fixture(scope="module")
def shared() -> SharedVocabulary:
    """A target that has `xyz` and `ab`, and a draft that spells everything but `abc`."""
    target = vocabularies.byte_level(["xyz xyz xyz", "ab ab ab"], 268)
    return SharedVocabulary(target, vocabularies.byte_level(["abc abc abc"], 261, ("<a>", "<b>")))


def own(shared: SharedVocabulary, text: str) -> list[int]:
    return [shared.draft.ids[char.encode()] for char in text]


def num_computed(shared: SharedVocabulary, params: SamplingParams, drafted: str) -> int:
    """After `q` was committed, these letters drafted, and `xyz` committed instead, which begins like some."""
    sequence = TokenSequence(params, 1, PagePool(num_pages=4, page_size=4).new_sequence(), 0)
    transcript = Transcript(shared, 64)
    first, second = ([shared.target.ids[text]] for text in (b"q", b"xyz"))
    DraftJob(sequence, 0, first, num_draft_tokens=3, committed=transcript.commit(0, first)).start()
    sequence.tokens += own(shared, drafted)
    sequence.cache.append(len(sequence.tokens) - 1)
    DraftJob(sequence, 1, second, num_draft_tokens=3, committed=transcript.commit(1, second)).start()
    assert sequence.tokens == own(shared, "qxyz")
    return sequence.cache.length


@pytest.mark.parametrize(
    ("rule", "wanted"), [(Rule.GUMBEL, [1, 2, 3]), (Rule.REJECTION, [1, 1, 1]), (Rule.BLOCK, [1, 1, 1])]
)
def test_what_was_drafted_stays_computed_where_tokens_are_matched_alone(
    shared: SharedVocabulary, rule: Rule, wanted: list[int]
) -> None:
    """Where they are sampled, nothing may tell about tokens that were not judged."""
    params = SamplingParams(seed=1, rule=rule)
    assert [num_computed(shared, params, drafted) for drafted in ("abc", "xbc", "xyc")] == wanted


def test_logits_become_the_distribution_over_shared_tokens(shared: SharedVocabulary) -> None:
    """A token that is not shared counts for the first of its text's; one without any counts for nothing."""
    target, draft = shared.target, shared.draft
    logits = torch.randn(2, len(draft.texts) + 3, generator=torch.Generator().manual_seed(0))
    logits[1, 7] = torch.nan
    scores = SharedScores(shared).of_target(logits)
    assert scores.shape == (2, len(target.texts))
    assert not scores[1].isfinite().any()
    probs, own_probs = scores[0].exp(), logits[0].softmax(dim=-1)
    assert b"abc" in draft.ids
    assert b"ab" not in draft.ids or b"ab" in target.ids
    first = target.encode(b"abc", goes_on=True)[0]
    expected = torch.zeros(len(target.texts))
    for text, own_id in draft.ids.items():
        found = target.ids.get(text, target.encode(text, goes_on=True)[0])
        if found in shared:
            expected[found] += own_probs[own_id]
    expected[target.tokenizer.eos_id or 0] += own_probs[draft.tokenizer.eos_id or 0]
    torch.testing.assert_close(probs, expected)
    assert first not in shared or expected[first] > own_probs[shared.to_draft([first])[0]]
    assert probs.sum() < 1


def test_text_is_drafted_from_before_the_open_end(shared: SharedVocabulary) -> None:
    """The last committed letter is chosen anew: `abc` instead of `a`, of which `bc` is proposed."""
    sequence = TokenSequence(
        SamplingParams(temperature=0, seed=1), 1, PagePool(num_pages=4, page_size=4).new_sequence(), 0
    )
    ids = [shared.target.ids[text] for text in (b"q", b"a")]
    committed = Transcript(shared, 64).commit(0, ids)
    job = StringJob(sequence, 0, ids, num_draft_tokens=2, num_candidates=2, committed=committed)
    job.start()
    assert (job.num_rows, sequence.tokens) == (2, own(shared, "qa"))
    limits, free = job.free_rows()
    assert free is None
    assert limits is not None
    assert {shared.draft.texts[i] for i in limits} >= {b"a", b"abc"}
    sequence.cache.append(2)
    abc, d = shared.draft.ids[b"abc"], shared.draft.ids[b"d"]
    target_of = shared.target.ids
    ranked = [[], [], [target_of[b"b"], 9]]
    job.add(Drawn([5, 0, target_of[b"z"]], ranked=ranked, own_ids={1: abc, 2: d}), 1)
    assert sequence.tokens == [*own(shared, "q"), abc]
    assert (sequence.cache.length, job.num_rows, job.free_rows()) == (1, 1, [None])
    job.add(Drawn([target_of[b"d"]], ranked=[[target_of[b"d"], 9]], own_ids={0: d}), 0)
    assert job.result == Proposal(2, [target_of[b"b"], target_of[b"c"]])
    assert job.candidates == [[9], []]
