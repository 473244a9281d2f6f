"""What people expect of an OpenAI-compatible server beside generations: small endpoints, CORS, leniency."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from specwire import SamplingParams, __version__, embedded
from specwire.http.bodies.chat import ChatBody
from specwire.http.bodies.completion import CompletionBody
from specwire.http.bodies.responses import ResponsesBody
from specwire.http.bodies.tokens import DetokenizeBody, TokenizeBody
from specwire.text.tokenizer import Tokenizer, load
from tests.support.fronts import CHAT_TEMPLATE, Fronted, front, fronted, save_chat_target
from tests.support.processes import wait_until

ELSEWHERE = "https://app.example"
UNKNOWN: dict[str, Any] = {"prompt": "x", "max_tokens": 1, "mirostat": 2, "top_a": 0.5}
SAID = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fronted]:
    template = tmp_path_factory.mktemp("chat") / "template.jinja"
    template.write_text(CHAT_TEMPLATE)
    with socket.create_server(("127.0.0.1", 0)) as free:
        metrics = f"127.0.0.1:{free.getsockname()[1]}"
    options = {"metrics_address": metrics, "chat_template": str(template)}
    passed_on = {"metrics_from": metrics}
    with fronted(embedded.TARGET_DIR, coordinator_options=options, front_options=passed_on) as running:
        yield running


@pytest.fixture(scope="module")
def known() -> Tokenizer:
    """The target's tokenizer."""
    found = load(embedded.TARGET_DIR)
    assert found is not None
    return found


def post(here: Fronted, path: str, **body: Any) -> httpx2.Response:
    return httpx2.post(here.url + path, json=body)


class TestTokens:
    def test_there_and_back(self, here: Fronted, known: Tokenizer) -> None:
        """Special tokens are written out."""
        text = "def f():\n    return 'ü'"
        answer = post(here, "/tokenize", model=here.model, prompt=text, return_token_strs=True).json()
        assert answer["tokens"] == known.encode(text)
        assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
        models = httpx2.get(here.url + "/v1/models").json()["data"]
        assert answer["max_model_len"] == models[0]["max_model_len"]
        draft = here.stack.client.get_model_info()[1]
        about = {"draft": draft.name if draft else None, "draft_shares_machine": draft is not None}
        assert models[0]["specwire"] == {"least_pass_ms": 0.0, "sampling": {}, **about}
        assert known.eos_id is not None
        answer = post(here, "/detokenize", tokens=[*answer["tokens"], known.eos_id]).json()
        assert answer == {"prompt": text + known.spell(known.eos_id)}

    def test_a_conversation_is_what_is_generated_from(self, here: Fronted) -> None:
        """With the coordinator's chat template, not the model's own."""
        tokens = post(here, "/tokenize", messages=SAID).json()["tokens"]
        chat = here.openai.chat.completions.create(model=here.model, messages=SAID, max_tokens=1)  # type: ignore[arg-type]
        assert chat.usage is not None
        assert len(tokens) == chat.usage.prompt_tokens
        text = post(here, "/detokenize", tokens=tokens).json()["prompt"]
        assert text == "# user: hi\n# assistant:"
        closed = post(here, "/tokenize", messages=SAID, add_generation_prompt=False).json()["tokens"]
        assert closed == tokens[: len(closed)]
        assert len(closed) < len(tokens)

    @pytest.mark.parametrize(
        ("path", "body", "param"),
        [
            ("/tokenize", {"prompt": "x", "messages": SAID}, "prompt"),
            ("/tokenize", {}, "prompt"),
            ("/tokenize", {"prompt": "x", "add_generation_prompt": True}, "add_generation_prompt"),
            ("/tokenize", {"messages": SAID, "add_special_tokens": True}, "add_special_tokens"),
            ("/tokenize", {"messages": SAID, "continue_final_message": True}, "continue_final_message"),
            ("/tokenize", {"prompt": "x" * (2 << 20)}, "prompt"),
            ("/tokenize", {"prompt": "x", "model": "other"}, "model"),
            ("/detokenize", {"tokens": [1, 99_999]}, "tokens[1]"),
            ("/detokenize", {"tokens": [1, -1]}, "tokens[1]"),
            ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
        ],
    )
    def test_refusals(self, here: Fronted, path: str, body: dict[str, Any], param: str) -> None:
        answer = post(here, path, **body)
        assert answer.status_code == (404 if param == "model" else 400)
        assert answer.json()["error"]["param"] == param


class TestAboutTheServer:
    def test_version(self, here: Fronted) -> None:
        assert httpx2.get(here.url + "/version").json() == {"version": __version__}

    def test_metrics_are_the_coordinators(self, here: Fronted) -> None:
        def generated() -> int:
            answer = httpx2.get(here.url + "/metrics")
            assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
            found = re.search(r"^specwire_generation_tokens_total{.*} (\d+)", answer.text, re.MULTILINE)
            return int(found[1]) if found else -1

        before = generated()
        here.stack.client.generate("x", SamplingParams(max_tokens=5, ignore_eos=True))
        assert generated() == before + 5
        openmetrics = httpx2.get(here.url + "/metrics", headers={"accept": "application/openmetrics-text"})
        assert openmetrics.text.endswith("# EOF\n")

    def test_metrics_that_are_not_there(self, here: Fronted) -> None:
        with front(here.stack.address) as address:
            answer = httpx2.get(f"http://{address}/metrics")
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "metrics_off")
            assert "`serve` needs the extra (pip install '.[metrics]')" in answer.json()["error"]["message"]
        with front(here.stack.address, metrics_from="127.0.0.1:1") as address:
            assert httpx2.get(f"http://{address}/metrics").status_code == 503

    def test_its_own_metrics_count_requests_by_route_and_status(self, here: Fronted) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            metrics = f"127.0.0.1:{free.getsockname()[1]}"

        def found() -> dict[str, str]:
            text = httpx2.get(f"http://{metrics}/metrics").text
            return dict(
                re.findall(r"^(\S*http_\S+(?:_count|_active_requests)\S*) (\S+)$", text, re.MULTILINE)
            )

        def requests(route: str, status: int) -> str:
            labels = f'http_response_status_code="{status}",http_route="{route}"'
            return f"http_server_request_duration_seconds_count{{{labels}}}"

        expected = {
            requests("/v1/completions", 200): "2.0",
            requests("/v1/completions", 400): "1.0",
            requests("/v1/models/{name:path}", 404): "1.0",
            requests("", 404): "1.0",
            "http_server_active_requests": "0.0",
            "specwire_http_time_to_first_token_seconds_count": "1.0",
        }
        with front(here.stack.address, metrics_address=metrics) as address:
            bodies: list[dict[str, Any]] = [{"stream": True}, {}, {"temperature": -1}]
            for body in bodies:
                body |= {"model": here.model, "prompt": "x", "max_tokens": 2}
                httpx2.post(f"http://{address}/v1/completions", json=body)
            for path in ("/v1/models/another", "/not/there"):
                httpx2.get(f"http://{address}{path}")
            # A request is counted a moment after its response has ended.
            wait_until(lambda: found() == expected, 10)


class TestDescription:
    def test_it_is_made_of_what_checks_the_bodies(self, here: Fronted) -> None:
        document = httpx2.get(here.url + "/openapi.json").json()
        schemas = document["components"]["schemas"]
        for kind in (CompletionBody, ChatBody, ResponsesBody, TokenizeBody, DetokenizeBody):
            described = schemas[kind.__name__]
            assert described["properties"].keys() == kind.model_fields.keys()
            assert described["additionalProperties"] is False
            assert described["properties"]["model"]["enum"] == [here.model]
        for path, methods in document["paths"].items():
            for method, operation in methods.items():
                assert operation["summary"], path
                answer = httpx2.request(method, here.url + path.replace("{name}", here.model))
                assert answer.status_code != 404 or answer.json()["error"]["code"] != "unknown_url"

    def test_the_page_has_every_parameter_and_loads_nothing(self, here: Fronted) -> None:
        answer = httpx2.get(here.url + "/docs")
        assert answer.headers["content-type"].startswith("text/html")
        for name in (*CompletionBody.model_fields, *ChatBody.model_fields, *ResponsesBody.model_fields):
            assert f"<code>{name}</code>" in answer.text
        assert not re.findall(r"<script|<link|src=|@import|url\(", answer.text)

    def test_the_documents_have_every_parameter(self) -> None:
        named = set(re.findall(r"\w+", (Path(__file__).parents[2] / "docs/openai.md").read_text()))
        fields = {name for kind in (CompletionBody, ChatBody, ResponsesBody) for name in kind.model_fields}
        assert fields <= named, fields - named


class TestUnknownParameters:
    def test_they_are_ignored_with_a_warning_where_the_front_is_lenient(self, here: Fronted) -> None:
        """Of any depth, in streams too, and only what is unknown: what is known is checked as ever."""
        with front(here.stack.address, lenient=True) as address:
            url = f"http://{address}/v1"
            body = {"model": here.model} | UNKNOWN
            told = '299 - "ignored: mirostat, top_a"'
            for stream in (False, True):
                answer = httpx2.post(url + "/completions", json=body | {"stream": stream})
                assert (answer.status_code, answer.headers["warning"]) == (200, told)
            said = [SAID[0] | {'\u00fcber"\n': 1}]
            chat = {"model": here.model, "messages": said, "max_tokens": 1}
            answer = httpx2.post(url + "/chat/completions", json=chat)
            assert (answer.status_code, answer.headers["warning"]) == (200, r'299 - "ignored: \u00fcber\"\n"')
            assert httpx2.post(url + "/completions", json=body | {"top_p": 7}).status_code == 400
            many = body | {f"k{i}": 1 for i in range(1000)}
            assert httpx2.post(url + "/completions", json=many).headers["warning"].endswith(' and 986 more"')
            clean = {key: body[key] for key in ("model", "prompt", "max_tokens")}
            assert "warning" not in httpx2.post(url + "/completions", json=clean).headers


class TestCors:
    def test_pages_of_a_named_origin_may_use_it(self, here: Fronted) -> None:
        with front(here.stack.address, cors_origin=f"{ELSEWHERE}, http://Other.example:81") as address:
            url = f"http://{address}/v1/models"
            asked = {
                "access-control-request-method": "POST",
                "access-control-request-headers": "authorization",
            }
            preflight = httpx2.request("OPTIONS", url, headers={"origin": ELSEWHERE} | asked)
            assert preflight.status_code == 200
            assert preflight.headers["access-control-allow-origin"] == ELSEWHERE
            assert "authorization" in preflight.headers["access-control-allow-headers"]
            answer = httpx2.get(url, headers={"origin": "http://other.example:81"})
            assert answer.headers["access-control-allow-origin"] == "http://other.example:81"
            assert "warning" in answer.headers["access-control-expose-headers"]
            other = httpx2.get(url, headers={"origin": "https://evil.example"})
            assert other.status_code == 403
            assert "access-control-allow-origin" not in other.headers
            host = httpx2.get(url, headers={"origin": ELSEWHERE, "host": "evil.example"})
            assert host.status_code == 403, "another name for this machine is still refused"

    def test_all_may(self, here: Fronted) -> None:
        with front(here.stack.address, cors_origin="*") as address:
            answer = httpx2.get(f"http://{address}/v1/models", headers={"origin": "null"})
            assert answer.headers["access-control-allow-origin"] == "*"

    def test_without_the_flag_none_is_granted(self, here: Fronted) -> None:
        answer = httpx2.get(here.url + "/v1/models", headers={"origin": here.url})
        assert answer.status_code == 200
        assert "access-control-allow-origin" not in answer.headers


class TestTemplates:
    """What the chat template reads beside role and content, seen through `/tokenize`."""

    def text(self, here: Fronted, **body: Any) -> str:
        answer = post(here, "/tokenize", add_generation_prompt=False, **body)
        assert answer.status_code == 200, answer.text
        return str(post(here, "/detokenize", tokens=answer.json()["tokens"]).json()["prompt"])

    def test_a_history_with_calls(self, here: Fronted) -> None:
        function = {"name": "weather", "arguments": '{"city": "Ulm"}'}
        history = [
            *SAID,
            {"role": "assistant", "tool_calls": [{"id": "c1", "type": "function", "function": function}]},
            {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        ]
        expected = "# user: hi\n# assistant: \n# weather(Ulm)\n# tool: rain\n"
        assert self.text(here, messages=history) == expected
        tokens = post(here, "/tokenize", messages=history).json()["tokens"]
        chat = post(here, "/v1/chat/completions", model=here.model, messages=history, max_tokens=1).json()
        assert chat["usage"]["prompt_tokens"] == len(tokens)

    def test_variables(self, here: Fronted) -> None:
        kwargs = {"reasoning_effort": "low"}
        assert self.text(here, messages=SAID, chat_template_kwargs=kwargs).startswith("# effort low\n")
        body = {"model": here.model, "messages": SAID, "max_tokens": 1}
        counts = [
            post(here, "/v1/chat/completions", **body, **more).json()["usage"]["prompt_tokens"]
            for more in ({"chat_template_kwargs": kwargs}, kwargs, {})
        ]
        assert counts[0] == counts[1] > counts[2]

    @pytest.mark.parametrize(
        ("changes", "param"),
        [
            ({"chat_template_kwargs": {"enable_thinking": True}}, "chat_template_kwargs.enable_thinking"),
            ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize"),
            (
                {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}},
                "reasoning_effort",
            ),
            ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
            (
                {"messages": [{"role": "user", "content": "x", "tool_call_id": "1"}]},
                "messages[0].tool_call_id",
            ),
            (
                {
                    "messages": [
                        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "["}}]}
                    ]
                },
                "messages[0].tool_calls[0].function.arguments",
            ),
        ],
    )
    def test_refusals(self, here: Fronted, changes: dict[str, Any], param: str) -> None:
        body = {"model": here.model, "messages": SAID, "max_tokens": 1} | changes
        answer = post(here, "/v1/chat/completions", **body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


class TestText:
    def test_special_tokens_are_kept_on_request(self, here: Fronted, known: Tokenizer) -> None:
        eos = known.eos_id
        body = {"model": here.model, "prompt": "x", "max_tokens": 2, "ignore_eos": True}
        body |= {"logit_bias": {str(eos): 100}, "temperature": 0}
        assert post(here, "/v1/completions", **body).json()["choices"][0]["text"] == ""
        kept = post(here, "/v1/completions", **body, skip_special_tokens=False).json()
        assert eos is not None
        assert kept["choices"][0]["text"] == known.spell(eos) * 2

    def test_the_shortest_output_is_the_callers(self, here: Fronted, known: Tokenizer) -> None:
        bias = {"logit_bias": {str(known.eos_id): 100}, "max_tokens": 8}
        short, none = (
            post(here, "/v1/completions", model=here.model, prompt="x", min_tokens=least, **bias).json()
            for least in (4, 9)
        )
        assert short["usage"]["completion_tokens"] == 5
        assert none["error"]["param"] == "min_tokens"


def test_a_request_that_does_not_say_how_is_sampled_as_the_model_asks(tmp_path: Path) -> None:
    """Of a generation config: with the likeliest token alone, what is drawn is greedy."""
    target = save_chat_target(tmp_path / "target")
    (target / "generation_config.json").write_text('{"eos_token_id": 0, "top_k": 1, "temperature": 0.9}')
    asked = {"prompt": "def f(", "max_tokens": 12, "ignore_eos": True, "seed": 5}

    def text(url: str, **given: Any) -> str:
        choice = httpx2.post(f"{url}/v1/completions", json={"model": "target", **asked, **given}).json()
        return str(choice["choices"][0]["text"])

    with fronted(target) as here, front(here.stack.address, sampling_defaults="openai") as neutral:
        greedy = text(here.url, temperature=0)
        said = {"temperature": 1.0, "top_k": -1}
        assert text(here.url) == text(here.url, temperature=5) == greedy
        assert text(here.url, **said) == text(f"http://{neutral}") != greedy
        assert text(here.url, use_beam_search=True, n=2, seed=None) == text(
            f"http://{neutral}", use_beam_search=True, n=2, seed=None
        )
        told = httpx2.get(f"{here.url}/v1/models").json()["data"][0]["specwire"]["sampling"]
    assert told == {"temperature": 0.9, "top_k": 1}
