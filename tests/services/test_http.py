"""The HTTP front through OpenAI's own client, against three real services."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator
from typing import Any, cast

import httpx2
import openai
import pytest
from openai.types.responses import Response

from specwire import AsyncClient, ModelInfo, SamplingParams, embedded
from specwire.config.client import HttpConfig
from specwire.http.model import Models
from specwire.rpc.wire.tokenizer_files import TokenizerFiles
from tests.support.fronts import Fronted, front, fronted, save_chat_target

PROMPT = "def fibonacci("
LENGTH = 12
QUESTION = [{"role": "user", "content": "How does a queue work?"}]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fronted]:
    target = save_chat_target(tmp_path_factory.mktemp("pair") / "target")
    with fronted(target, embedded.DRAFT_DIR) as running:
        yield running


def complete(here: Fronted, **changes: Any) -> Any:
    request: dict[str, Any] = {"model": here.model, "prompt": PROMPT, "max_tokens": LENGTH, "seed": 7}
    return here.openai.completions.create(**request | changes)


def chat(here: Fronted, **changes: Any) -> Any:
    request: dict[str, Any] = {"model": here.model, "messages": QUESTION, "max_tokens": LENGTH, "seed": 7}
    return here.openai.chat.completions.create(**request | changes)


def by_sdk(here: Fronted, messages: Any = None, **params: Any) -> Any:
    settings = SamplingParams(**{"max_tokens": LENGTH, "seed": 7} | params)
    return here.stack.client.generate(None if messages else PROMPT, settings, messages=messages)


def respond(here: Fronted, **changes: Any) -> Any:
    asked = QUESTION[0]["content"]
    request: dict[str, Any] = {"model": here.model, "input": asked, "max_output_tokens": LENGTH}
    extra = {"seed": 7} | changes.pop("extra_body", {})
    return here.openai.responses.create(**request | changes, extra_body=extra)


class TestCompletions:
    def test_the_text_is_that_of_the_sdk_and_streamed_the_same(self, here: Fronted) -> None:
        answer, done = complete(here), by_sdk(here)
        assert answer.object == "text_completion"
        assert answer.choices[0].text == done.text
        assert answer.choices[0].finish_reason == "length"
        assert answer.choices[0].logprobs is None
        assert answer.usage.prompt_tokens == done.usage.prompt_tokens
        assert answer.usage.completion_tokens == LENGTH
        assert answer.usage.total_tokens == done.usage.prompt_tokens + LENGTH
        chunks = list(complete(here, stream=True))
        assert "".join(chunk.choices[0].text for chunk in chunks) == done.text
        assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
        assert len({chunk.id for chunk in chunks}) == 1
        assert not any("specwire" in (chunk.model_extra or {}) for chunk in chunks), "only who asks pays"

    def test_usage_counts_draft_tokens_of_the_text_alone(self, here: Fronted) -> None:
        """A stop token may be in the middle of a proposal."""
        ids = by_sdk(here, num_draft_tokens=16).token_ids
        num_cut = 0
        for index in range(2, 8):
            options = {"num_draft_tokens": 16, "stop_token_ids": [ids[index]], "return_fates": True}
            answer = complete(here, extra_body=options)
            fates = [token["fate"] for token in answer.choices[0].specwire["tokens"]]
            details, counts = answer.usage.completion_tokens_details, answer.specwire[0]["speculation"]
            assert details.accepted_prediction_tokens == fates.count("accepted")
            num_cut += counts["num_accepted_tokens"] - details.accepted_prediction_tokens
        assert num_cut > 0

    def test_usage_fates_and_progress_are_sent_on_request(self, here: Fronted) -> None:
        options = {"stream_options": {"include_usage": True}, "extra_body": {"return_fates": True}}
        *chunks, reason, last = complete(here, stream=True, max_tokens=24, **options)
        assert all(chunk.usage is None for chunk in (*chunks, reason))
        [record] = last.specwire
        assert (record["seed"], record["rule"]) == (7, "gumbel")
        counts, details = record["speculation"], last.usage.completion_tokens_details
        assert details.accepted_prediction_tokens == counts["num_accepted_tokens"] > 0
        drafted = details.accepted_prediction_tokens + details.rejected_prediction_tokens
        assert drafted == counts["num_draft_tokens"]
        [source] = counts["by_source"]
        assert (source["source"], source["num_draft_tokens"]) == (embedded.DRAFT_DIR.name, drafted)
        assert last.usage.completion_tokens == 24
        extras = [chunk.choices[0].specwire for chunk in chunks]
        tokens = [token for extra in extras for token in extra["tokens"]]
        fates = [token["fate"] for token in tokens]
        assert len(fates) == 24
        assert fates.count("accepted") == counts["num_accepted_tokens"]
        for token in tokens:
            assert token["source"] == (embedded.DRAFT_DIR.name if token["fate"] == "accepted" else "")
        assert sum(len(extra["tree"]["path"]) + 1 for extra in extras) == 24
        assert fates.count("recovered") == sum(len(extra["rejected"]) for extra in extras)
        assert "".join(token["text"] for token in tokens) == by_sdk(here, max_tokens=24).text
        progress = [extra["speculation"]["num_rounds"] for extra in extras]
        assert progress == sorted(set(progress)), "each chunk is a later round"
        known = {name: counts[name] for name in extras[-1]["speculation"]}
        assert extras[-1]["speculation"] == known, "the last progress is the record"
        assert 0 < extras[-1]["timing"]["verify_ms"] <= record["timing"]["verify_ms"]
        whole = complete(here, max_tokens=24, extra_body={"return_fates": True}).choices[0].specwire
        assert [token["fate"] for token in whole["tokens"]] == fates

    def test_seed_rule_source_and_length_of_the_draft_are_the_callers(self, here: Fronted) -> None:
        plain = complete(here, extra_body={"num_draft_tokens": 0, "rule": "gumbel"})
        assert plain.specwire[0]["speculation"]["num_draft_tokens"] == 0
        assert plain.choices[0].text == complete(here).choices[0].text
        rejection = complete(here, extra_body={"rule": "rejection", "num_draft_tokens": 3})
        assert rejection.specwire[0]["rule"] == "rejection"
        assert "sampled under rule rejection" in rejection.specwire[0]["why_not_reproducible"]
        assert rejection.choices[0].text == by_sdk(here, rule="rejection", num_draft_tokens=3).text
        assert complete(here, seed=8).choices[0].text != plain.choices[0].text
        ngram = complete(here, extra_body={"draft": "ngram"})
        assert ngram.choices[0].text == plain.choices[0].text
        assert {each["source"] for each in ngram.specwire[0]["speculation"]["by_source"]} <= {"ngram"}

    def test_every_sampling_parameter_arrives(self, here: Fronted) -> None:
        openais = {"temperature": 0.9, "top_p": 0.95, "presence_penalty": 0.5, "frequency_penalty": 0.25}
        extras = {"top_k": 50, "min_p": 0.01, "repetition_penalty": 1.2, "ignore_eos": True}
        bias = {220: -5.0, 300: 2.0}
        answer = complete(
            here,
            **openais,
            extra_body=extras,
            logit_bias={str(token): value for token, value in bias.items()},
        )
        assert answer.choices[0].text == by_sdk(here, **openais, **extras, logit_bias=bias).text

    def test_n_choices_have_the_seeds_that_follow(self, here: Fronted) -> None:
        answer = complete(here, n=3)
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert [record["seed"] for record in answer.specwire] == [7, 8, 9]
        assert [choice.text for choice in answer.choices] == [by_sdk(here, seed=7 + i).text for i in range(3)]
        assert answer.usage.completion_tokens == 3 * LENGTH
        assert answer.usage.prompt_tokens == by_sdk(here).usage.prompt_tokens, "the prompt counts once"

    def test_n_streams_come_together(self, here: Fronted) -> None:
        texts, order = {0: "", 1: ""}, []
        for chunk in complete(here, n=2, stream=True, max_tokens=32):
            [choice] = chunk.choices
            texts[choice.index] += choice.text
            order.append(choice.index)
        whole = complete(here, n=2, max_tokens=32)
        assert texts == {choice.index: choice.text for choice in whole.choices}
        assert order != sorted(order), "one after the other would make the second wait"

    def test_prompts_are_text_or_tokens_one_or_several(self, here: Fronted) -> None:
        prompts: tuple[Any, ...] = ([PROMPT, "import os"], [[40, 41, 42], [50, 51]])
        for several in prompts:
            together = complete(here, prompt=several, n=2, max_tokens=4).choices
            alone = [complete(here, prompt=prompt, n=2, max_tokens=4).choices for prompt in several]
            assert [c.text for c in together] == [c.text for choices in alone for c in choices]

    def test_stop_strings_and_tokens(self, here: Fronted) -> None:
        text = complete(here).choices[0].text
        stop = text[10:13]
        stopped = complete(here, stop=stop)
        assert stopped.choices[0].text == text[: text.index(stop)]
        assert stopped.choices[0].finish_reason == "stop"
        assert stopped.specwire[0]["stop_reason"] == stop
        fifth = complete(here, extra_body={"return_fates": True}).choices[0].specwire["tokens"][5]["id"]
        by_id = complete(here, extra_body={"stop_token_ids": [fifth]})
        assert by_id.choices[0].finish_reason == "stop"
        assert by_id.specwire[0]["stop_reason"] == fifth

    def test_a_beam_search_has_its_texts_as_choices(self, here: Fronted) -> None:
        """Best first, as of the SDK, with counts once; a wrong combination is refused by name."""
        body = {"use_beam_search": True, "length_penalty": 2.0, "early_stopping": True}
        answer = complete(here, n=3, seed=None, max_tokens=8, extra_body=body)
        params = {"num_beams": 3, "num_return_sequences": 3, "length_penalty": 2.0, "early_stopping": True}
        done = by_sdk(here, temperature=0, seed=None, max_tokens=8, **params)
        assert [choice.text for choice in answer.choices] == [each.text for each in done.hypotheses]
        assert [record["score"] for record in answer.specwire] == [each.score for each in done.hypotheses]
        assert answer.usage.completion_tokens == done.usage.completion_tokens
        assert answer.usage.prompt_tokens == done.usage.prompt_tokens
        wrong: dict[str, dict[str, Any]] = {
            "n": {"n": 1},
            "stream": {"n": 2, "stream": True},
            "temperature": {"n": 2, "temperature": 0.5},
        }
        for param, changes in wrong.items():
            with pytest.raises(openai.APIStatusError) as refused:
                complete(here, seed=None, extra_body={"use_beam_search": True}, **changes)
            assert cast("dict[str, Any]", refused.value.body)["param"] == param

    def test_logprobs(self, here: Fronted) -> None:
        found = complete(here, logprobs=3).choices[0]
        logprobs, done = found.logprobs, by_sdk(here, logprobs=3)
        assert logprobs.token_logprobs == [token.logprob for token in done.tokens]
        assert "".join(logprobs.tokens) == found.text
        offsets = zip(logprobs.text_offset, logprobs.tokens, strict=True)
        assert all(found.text[offset:].startswith(token) for offset, token in offsets)
        for token, logprob, top in zip(
            logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True
        ):
            assert top[token] == logprob
            assert 3 <= len(top) <= 4
        streamed = [chunk.choices[0].logprobs for chunk in complete(here, logprobs=3, stream=True)]
        assert [n for part in streamed if part for n in part.text_offset] == logprobs.text_offset

    def test_a_request_is_left_to_openais_default_length(self, here: Fronted) -> None:
        assert complete(here, max_tokens=None).usage.completion_tokens == 16

    def test_text_needs_no_tokenizer_of_the_front(self, here: Fronted) -> None:
        """Text and conversations are the coordinator's; only log probabilities need tokens to be spelled."""
        with (
            front(here.stack.address, tokenizer="/nowhere/at/all") as address,
            openai.OpenAI(base_url=f"http://{address}/v1", api_key="-", max_retries=0) as client,
        ):
            completions: Any = client.completions
            wanted = {"model": here.model, "prompt": PROMPT, "max_tokens": 4}
            assert completions.create(**wanted).usage.completion_tokens == 4
            answer = client.chat.completions.create(model=here.model, messages=QUESTION, max_tokens=4)  # type: ignore[arg-type]
            assert answer.usage is not None
            assert answer.usage.completion_tokens == 4
            with pytest.raises(openai.InternalServerError) as refused:
                completions.create(**wanted, logprobs=1)
            assert refused.value.status_code == 503


class TestChat:
    def test_the_text_is_that_of_the_sdk_and_streamed_the_same(self, here: Fronted) -> None:
        answer, done = chat(here), by_sdk(here, messages=QUESTION)
        assert answer.choices[0].message.content == done.text
        assert answer.choices[0].message.role == "assistant"
        assert answer.object == "chat.completion"
        assert answer.usage.prompt_tokens == done.usage.prompt_tokens
        first, *chunks, last = chat(here, stream=True, stream_options={"include_usage": True})
        assert first.choices[0].delta.role == "assistant"
        assert last.usage.prompt_tokens == answer.usage.prompt_tokens
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == done.text
        assert chunks[-1].choices[0].finish_reason == "length"

    def test_parts_and_answers_that_come_back_are_messages(self, here: Fronted) -> None:
        answer = chat(here).choices[0].message
        more = [
            *QUESTION,
            answer.model_dump(),
            {"role": "user", "content": [{"type": "text", "text": "And?"}]},
        ]
        plain = [
            *QUESTION,
            {"role": "assistant", "content": answer.content},
            {"role": "user", "content": "And?"},
        ]
        assert chat(here, messages=more).choices[0].message == chat(here, messages=plain).choices[0].message

    def test_logprobs(self, here: Fronted) -> None:
        content = chat(here, logprobs=True, top_logprobs=2).choices[0].logprobs.content
        assert "".join(entry.token for entry in content) == chat(here).choices[0].message.content
        assert all(len(entry.top_logprobs) == 2 for entry in content)
        assert all(bytes(entry.bytes).decode() == entry.token for entry in content)
        assert all(math.isfinite(entry.logprob) and entry.logprob <= 0 for entry in content)
        assert chat(here, logprobs=True).choices[0].logprobs.content[0].top_logprobs == []

    def test_without_a_limit_it_goes_on_to_the_end_of_the_context(self, here: Fronted) -> None:
        long = "a queue " * 670
        usage = chat(here, messages=[{"role": "user", "content": long}], max_tokens=None).usage
        extra = here.openai.models.retrieve(here.model).model_extra
        assert extra is not None
        assert usage.total_tokens <= extra["max_model_len"]
        limited = chat(here, max_tokens=None, max_completion_tokens=5)
        assert limited.usage.completion_tokens == 5


CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "x"}
TOOL = {"type": "function", "name": "f"}


def said(kind: str, text: str) -> dict[str, str]:
    """A part of a message."""
    return {"type": kind, "text": text}


class TestResponses:
    """`/v1/responses`."""

    def test_the_text_is_that_of_the_sdk(self, here: Fronted) -> None:
        answer, done = respond(here), by_sdk(here, messages=QUESTION)
        assert answer.output_text == done.text
        assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert answer.usage.input_tokens == done.usage.prompt_tokens
        assert answer.usage.output_tokens == LENGTH
        assert answer.specwire["seed"] == 7

    def test_input_and_instructions_are_one_conversation(self, here: Fronted) -> None:
        before = respond(here)
        history = [*QUESTION, *(item.model_dump(exclude_none=True) for item in before.output)]
        history.append({"role": "user", "content": [said("input_text", "And a stack?")]})
        answer = respond(here, input=history, instructions="Be brief.", temperature=0.5, top_p=0.9)
        messages = [
            {"role": "system", "content": "Be brief."},
            *QUESTION,
            {"role": "assistant", "content": before.output_text},
            {"role": "user", "content": "And a stack?"},
        ]
        assert answer.output_text == by_sdk(here, messages=messages, temperature=0.5, top_p=0.9).text
        assert (answer.temperature, answer.top_p, answer.instructions) == (0.5, 0.9, "Be brief.")

    def test_a_history_with_calls_is_that_of_the_chat(self, here: Fronted) -> None:
        """Text and calls of one response are one turn."""
        call = {"name": "weather", "arguments": '{"city": "Ulm"}'}
        history = [
            *QUESTION,
            {"type": "message", "role": "assistant", "content": [said("output_text", "Let me see.")]},
            {"type": "function_call", "call_id": "c1", "id": "fc_1", "status": "completed", **call},
            {"type": "function_call", "call_id": "c2", **call},
            {"type": "function_call_output", "call_id": "c1", "output": "rain"},
            {"type": "function_call_output", "call_id": "c2", "output": [said("input_text", "sun")]},
        ]
        function = {"name": "weather", "arguments": {"city": "Ulm"}}
        calls = [{"type": "function", "id": f"c{i}", "function": function} for i in (1, 2)]
        messages = [
            *QUESTION,
            {"role": "assistant", "content": "Let me see.", "tool_calls": calls},
            {"role": "tool", "tool_call_id": "c1", "content": "rain"},
            {"role": "tool", "tool_call_id": "c2", "content": "sun"},
        ]
        answer, done = respond(here, input=history), by_sdk(here, messages=messages)
        assert (answer.usage.input_tokens, answer.output_text) == (done.usage.prompt_tokens, done.text)

    def test_one_that_ends_by_itself_is_complete(self, here: Fronted) -> None:
        first = by_sdk(here, messages=QUESTION).token_ids[0]
        answer = respond(here, extra_body={"stop_token_ids": [first]})
        assert (answer.status, answer.incomplete_details) == ("completed", None)
        effort = respond(here, reasoning={"effort": "low"}, max_output_tokens=1)
        assert effort.usage.input_tokens > answer.usage.input_tokens
        assert effort.reasoning.effort == "low"

    def test_the_events_of_a_stream(self, here: Fronted) -> None:
        events = list(respond(here, stream=True))
        kinds = [event.type for event in events]
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert kinds == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            *["response.output_text.delta"] * len(deltas),
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.incomplete",
        ]
        assert [event.sequence_number for event in events] == [*range(len(events))]
        last: Response = events[-1].response
        done = by_sdk(here, messages=QUESTION)
        assert "".join(deltas) == last.output_text == events[len(deltas) + 4].text == done.text
        assert len(deltas) > 1
        assert last.usage is not None
        assert last.usage.output_tokens == LENGTH
        extra = {"seed": 7, "stop_token_ids": [done.token_ids[7]]}
        asked = QUESTION[0]["content"]
        with here.openai.responses.stream(model=here.model, input=asked, extra_body=extra) as stream:
            whole = stream.get_final_response()
        assert done.text.startswith(whole.output_text)
        assert whole.output_text, "their own accumulator follows it"

    def test_events_are_named_on_the_wire(self, here: Fronted) -> None:
        body = {"model": here.model, "input": "x", "max_output_tokens": 1, "stream": True}
        text = httpx2.post(f"{here.url}/v1/responses", json=body).text
        assert text.startswith(
            'event: response.created\ndata: {"type":"response.created","sequence_number":0,'
        )
        assert "[DONE]" not in text

    def test_an_error_in_mid_stream_is_an_event(self, here: Fronted) -> None:
        """Of the deadline, which is the front's own."""
        with front(here.stack.address, timeout_s=0.4) as address:
            body = {"model": here.model, "input": "x", "stream": True, "ignore_eos": True}
            text = httpx2.post(f"http://{address}/v1/responses", json=body, timeout=30).text
        last = text.strip().split("\n\n")[-1]
        assert last.startswith("event: error\ndata: ")
        assert '"code":"deadline_exceeded"' in last

    # What tools and their choice may be: `test_http_tools`, for both kinds of bodies.
    @pytest.mark.parametrize(
        ("changes", "param"),
        [
            ({"store": True}, "store"),
            ({"previous_response_id": "resp_1"}, "previous_response_id"),
            ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
            ({"background": True}, "background"),
            ({"truncation": "auto"}, "truncation"),
            ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
            ({"text": {"format": {"type": "text", "schema": {}}}}, "text.format.schema"),
            ({"max_output_tokens": 0}, "max_output_tokens"),
            ({"input": []}, "input"),
            ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content"),
            ({"input": [{"type": "reasoning", "summary": []}]}, "input[0]"),
            ({"input": [CALL | {"arguments": "["}]}, "input[0].arguments"),
            ({"input": [*QUESTION, CALL, RESULT | {"call_id": "c2"}]}, "input[2].call_id"),
            ({"tools": [TOOL | {"strict": True}]}, "tools[0].strict"),
            ({"extra_body": {"n": 2}}, "n"),
            ({"extra_body": {"max_tokens": 2}}, "max_tokens"),
        ],
    )
    def test_refusals(self, here: Fronted, changes: dict[str, Any], param: str) -> None:
        with pytest.raises(openai.BadRequestError) as refused:
            respond(here, **changes)
        assert refused.value.param == param


class TestTogether:
    async def test_many_clients_at_once(self, here: Fronted) -> None:
        alone = [complete(here, seed=seed).choices[0].text for seed in range(4)]
        async with openai.AsyncOpenAI(base_url=f"{here.url}/v1", api_key="-", max_retries=0) as client:

            async def one(seed: int) -> str:
                parts = await client.completions.create(
                    model=here.model, prompt=PROMPT, max_tokens=LENGTH, seed=seed, stream=True
                )
                return "".join([part.choices[0].text async for part in parts])

            assert await asyncio.gather(*(one(seed) for seed in range(4))) == alone

    def test_a_client_that_leaves_frees_its_memory(self, here: Fronted) -> None:
        here.stack.assert_idle_within(10)
        stream = complete(here, stream=True, max_tokens=700, extra_body={"ignore_eos": True})
        next(iter(stream))
        assert here.stack.status("verify").num_held_pages > 0
        stream.close()
        here.stack.assert_idle_within(10)


def test_models(here: Fronted) -> None:
    [model] = here.openai.models.list().data
    assert model.id == here.model == "target"
    assert time.time() - 3600 < model.created <= time.time(), "when the front began to serve it"
    assert here.openai.models.retrieve(model.id) == model


async def test_another_model_is_spelled_by_its_own_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A coordinator comes back with another model; the tokenizer is loaded when tokens are to be spelled."""

    class Coordinator:
        source = "base"

        async def get_model_info(self, **_: object) -> tuple[ModelInfo, None]:
            return ModelInfo(name=self.source, vocab_size=8, context_len=8, tokenizer_hash=self.source), None

        async def get_tokenizer(self, token: str) -> TokenizerFiles:
            return TokenizerFiles()

    class Spelled:
        def __init__(self, files: TokenizerFiles, source: str, template: str) -> None:
            loaded.append(source)
            self.source = source

        def spell(self, token_id: int) -> str:
            return f"{token_id} of {self.source}"

    loaded: list[str] = []
    monkeypatch.setattr("specwire.http.model._load", Spelled)
    coordinator = Coordinator()
    models = Models(cast(AsyncClient, coordinator), HttpConfig())
    for source, token in (("base", "a"), ("base", "b"), ("tuned", "c")):  # a token's first answer is fresh
        coordinator.source = source
        served = await models.served(token)
        assert served.name == source
        assert (await models.speller(served))(7) == f"7 of {source}"
    assert loaded == ["base", "tuned"]
