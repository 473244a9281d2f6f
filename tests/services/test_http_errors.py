"""What the HTTP front refuses, in OpenAI's shape, as OpenAI's client raises it."""

from __future__ import annotations

import json
import ssl
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from specwire import errors
from specwire.config.client import HttpConfig
from specwire.config.security.bearer import make_token
from specwire.errors import ConfigError
from specwire.http import server
from specwire.http.errors import api_error
from specwire.http.model import Models
from tests.support.certificates import Authority
from tests.support.fixtures import entered
from tests.support.fronts import Fronted, front, fronted
from tests.support.harness import local_stack, on_own_loop

EMULATED = "emulated:step_ms=1"
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


here = entered(lambda: fronted(EMULATED))
"""Knows no text: what is refused is refused before any is needed."""


def post(here: Fronted, path: str, body: Any, **headers: str | bytes) -> tuple[int, dict[str, Any], Any]:
    """Status, error object and headers of a request as it stands."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    pairs: Any = {"content-type": "application/json", **headers}
    response = httpx2.post(here.url + path, content=data, headers=pairs, timeout=60)
    return response.status_code, response.json().get("error", {}), response.headers


def completion(here: Fronted, **fields: Any) -> dict[str, Any]:
    return {"model": here.model, "prompt": [1, 2], "max_tokens": 4} | fields


def conversation(here: Fronted, **fields: Any) -> dict[str, Any]:
    return {"model": here.model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4} | fields


SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integer"}}}
REFUSED: dict[str, list[tuple[dict[str, Any], str, str]]] = {
    COMPLETIONS: [
        ({"temperature": "hot"}, "temperature", "invalid_value"),
        ({"temperature": -1}, "temperature", "invalid_value"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"max_tokens": 2**21}, "max_tokens", "context_length_exceeded"),
        ({"top_k": 2**31}, "top_k", "invalid_value"),
        ({"logit_bias": {str(2**31): 1}}, "logit_bias[2147483648]", "invalid_value"),
        ({"n": 0}, "n", "invalid_value"),
        ({"seed": -1}, "seed", "invalid_value"),
        ({"logprobs": 21}, "logprobs", "invalid_value"),
        ({"logit_bias": {"a": 1}}, "logit_bias['a']", "invalid_value"),
        ({"prompt": []}, "prompt", "invalid_value"),
        ({"prompt": [1, 10**6]}, "prompt[1]", "invalid_value"),
        ({"prompt": "text"}, "prompt", "unsupported_value"),
        ({"prompt": None}, "prompt", "invalid_value"),
        ({"stop": "x"}, "stop", "unsupported_value"),
        ({"rule": "greedy"}, "rule", "invalid_value"),
        ({"num_draft_tokens": 65}, "num_draft_tokens", "invalid_value"),
        ({"draft": "eagle"}, "draft", "invalid_value"),
        ({"draft": "off", "num_draft_tokens": 4}, "draft", "invalid_value"),
        ({"max_depth": 4, "rule": "rejection"}, "max_depth", "invalid_value"),
        ({"echo": True, "n": 2, "use_beam_search": True}, "echo", "invalid_value"),
        ({"best_of": 2}, "best_of", "unsupported_value"),
        ({"suffix": "x"}, "suffix", "unsupported_value"),
        ({"store": True}, "store", "unsupported_value"),
        ({"temprature": 1}, "temprature", "unknown_parameter"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
        ({"stream": True, "stream_options": {"often": 1}}, "stream_options.often", "unknown_parameter"),
    ],
    CHAT: [
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "invalid_value"),
        (
            {"messages": [{"role": "user", "content": "x", "weight": 1}]},
            "messages[0].weight",
            "unknown_parameter",
        ),
        ({}, "messages", "unsupported_value"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "missing_required_parameter"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "unsupported_value"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "invalid_value"),
        ({"guided_regex": "a+", "guided_choice": ["a"]}, "guided_choice", "invalid_value"),
        ({"guided_choice": []}, "guided_choice", "invalid_value"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "invalid_value"),
        ({"modalities": ["audio"]}, "modalities[0]", "unsupported_value"),
        ({"top_logprobs": 2}, "top_logprobs", "invalid_value"),
        ({"max_completion_tokens": 5}, "max_tokens", "invalid_value"),
        ({"max_tokens": None, "max_completion_tokens": 0}, "max_completion_tokens", "invalid_value"),
        ({"use_beam_search": True, "n": 100}, "n", "invalid_value"),
        ({"response_format": SCHEMA}, "response_format.json_schema.schema", "unsupported_value"),
        ({"guided_regex": "a+"}, "guided_regex", "unsupported_value"),
        ({"prompt": "x"}, "prompt", "unknown_parameter"),
    ],
}


@pytest.mark.parametrize(
    ("path", "fields", "param", "code"), [(path, *row) for path, rows in REFUSED.items() for row in rows]
)
def test_refused_by_name(here: Fronted, path: str, fields: dict[str, Any], param: str, code: str) -> None:
    make = completion if path == COMPLETIONS else conversation
    status, error, _ = post(here, path, make(here, **fields))
    found = (status, error["type"], error["param"], error["code"])
    assert found == (400, "invalid_request_error", param, code)
    assert path == CHAT or param.partition("[")[0] in error["message"]


@pytest.mark.parametrize(("field", "value"), [("n", 129), ("logprobs", 21), ("echo", 2), ("best_of", 2)])
def test_numbers_are_named(here: Fronted, field: str, value: int) -> None:
    _, error, _ = post(here, COMPLETIONS, completion(here, **{field: value}))
    assert error["message"].startswith(f"{field}={value}: ")


@pytest.mark.parametrize(
    ("message", "param", "said"),
    [
        ({"role": "robot"}, "role", "'robot' is none of system, developer, user, assistant, tool"),
        ({"content": [{"type": "image_url"}]}, "content", "image input is not supported"),
        ({"content": [{"type": "input_audio"}]}, "content", "audio input is not supported"),
        ({"content": [{"type": "refusal"}]}, "content", "this part is not supported (type 'refusal')"),
    ],
)
def test_messages_are_refused_by_what_they_are(
    here: Fronted, message: dict[str, Any], param: str, said: str
) -> None:
    messages = [{"role": "user", "content": "x"} | message]
    status, error, _ = post(here, CHAT, conversation(here, messages=messages))
    assert (status, error["param"]) == (400, f"messages[0].{param}")
    assert said in error["message"]


def test_what_clients_send_by_habit_is_accepted(here: Fronted) -> None:
    habits = {"user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "best_of": 1}
    neutral = {"echo": False, "suffix": None, "n": 1, "top_k": -1, "prompt_cache_key": "k"}
    status, _, _ = post(here, COMPLETIONS, completion(here, **habits, **neutral))
    assert status == 200


def test_bodies_that_are_none(here: Fronted) -> None:
    for body, code in ((b"{", "invalid_json"), (b"[]", "invalid_json"), (b"\xff", "invalid_json")):
        status, error, _ = post(here, COMPLETIONS, body)
        assert (status, error["code"]) == (400, code)
    status, error, _ = post(here, COMPLETIONS, {"prompt": [1]})
    assert (status, error["param"], error["code"]) == (400, "model", "missing_required_parameter")
    form = {"content-type": "application/x-www-form-urlencoded"}
    status, error, _ = post(here, COMPLETIONS, completion(here), **form)
    assert (status, error["code"]) == (415, "unsupported_media_type")
    status, error, _ = post(here, COMPLETIONS, completion(here), **{"content-encoding": "gzip"})
    assert (status, error["code"]) == (415, "unsupported_media_type")
    assert "gzip" in error["message"]


@pytest.mark.parametrize("twice", [b'"max_tokens":"x","max_tokens":2', b'"logit_bias":{"1":1,"1":2}'])
def test_a_key_twice(here: Fronted, twice: bytes) -> None:
    body = b'{"model":%b,"prompt":[1],%b}' % (json.dumps(here.model).encode(), twice)
    status, error, _ = post(here, COMPLETIONS, body)
    name = twice.split(b'"')[-2].decode()
    assert (status, error["param"], error["code"]) == (400, name, "invalid_value")


def test_routes_and_models_that_are_not_there(here: Fronted) -> None:
    status, error, _ = post(here, "/v1/embeddings", {})
    assert (status, error["code"]) == (404, "unknown_url")
    response = httpx2.get(here.url + COMPLETIONS)
    assert (response.status_code, response.json()["error"]["code"]) == (405, "method_not_allowed")
    with pytest.raises(openai.NotFoundError) as raised:
        here.openai.completions.create(model="gpt-9", prompt=[1])
    assert (raised.value.param, raised.value.code) == ("model", "model_not_found")
    with pytest.raises(openai.NotFoundError):
        here.openai.models.retrieve("gpt-9")


def test_every_response_has_a_request_id(here: Fronted) -> None:
    for given, expected in ((None, "req-"), ("mine-1", "mine-1"), ("no spaces", "req-")):
        headers = {"x-request-id": given} if given else {}
        _, _, found = post(here, COMPLETIONS, completion(here), **headers)
        assert found["x-request-id"].startswith(expected)


def test_a_defect_has_one_too(here: Fronted, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Models, "served", broken)
    status, error, found = post(here, COMPLETIONS, completion(here), **{"x-request-id": "mine-2"})
    assert (status, error["type"], found["x-request-id"]) == (500, "server_error", "mine-2")


def test_headers_that_cannot_be_passed_on(here: Fronted) -> None:
    status, error, _ = post(
        here, COMPLETIONS, completion(here), authorization="Bearer gr\u00fcn".encode("latin-1")
    )
    assert (status, error["code"]) == (401, "invalid_api_key")
    status, _, _ = post(here, COMPLETIONS, completion(here), traceparent="\u00fc".encode("latin-1"))
    assert status == 200


def test_a_full_coordinator_says_when_to_come_back() -> None:
    full = {"max_running": 1, "max_waiting": 0}
    with fronted("emulated:step_ms=5", coordinator_options=full) as here:
        stream = here.openai.completions.create(model=here.model, prompt=[1], max_tokens=15_000, stream=True)
        next(iter(stream))
        with pytest.raises(openai.RateLimitError) as raised:
            here.openai.completions.create(model=here.model, prompt=[1])
        stream.close()
    assert int(raised.value.response.headers["retry-after"]) >= 1
    assert raised.value.code == "rate_limit_exceeded"


def test_a_deadline_that_passes_before_and_amid_the_answer(here: Fronted) -> None:
    wanted = completion(here, max_tokens=15_000)
    with front(here.stack.address, timeout_s=0.3) as address:
        headers = {"content-type": "application/json"}
        url = f"http://{address}{COMPLETIONS}"
        whole = httpx2.post(url, content=json.dumps(wanted), headers=headers, timeout=30)
        error = whole.json()["error"]
        assert (whole.status_code, error["type"], error["code"]) == (
            504,
            "timeout_error",
            "deadline_exceeded",
        )
        client = openai.OpenAI(base_url=f"http://{address}/v1", api_key="-", max_retries=0)
        with client, pytest.raises(openai.APIError, match=r"(?i)deadline"):
            for _ in client.completions.create(**wanted, stream=True):
                pass


def test_no_coordinator() -> None:
    with front("127.0.0.1:1") as address:
        client = openai.OpenAI(base_url=f"http://{address}/v1", api_key="-", max_retries=0)
        with client, pytest.raises(openai.InternalServerError) as raised:
            client.models.list()
        assert httpx2.get(f"http://{address}/health").status_code == 503
    assert (raised.value.status_code, raised.value.type) == (503, "service_unavailable_error")
    assert raised.value.code == "unavailable"


def test_one_that_is_cancelled_may_ask_again() -> None:
    told = api_error(errors.RequestCancelledError("the server is shutting down"))
    assert (told.status, told.code, str(told)) == (503, "cancelled", "the server is shutting down")


@pytest.mark.parametrize("defect", [ValueError("/etc/secret"), errors.ModelLoadError("/models/x")])
def test_a_defect_tells_nothing(defect: Exception) -> None:
    told = api_error(defect)
    assert told.status == 500
    assert "/" not in str(told)


def test_tls_and_tokens(tmp_path: Path) -> None:
    """TLS on both sides of the front, and a token that it passes on without knowing it."""
    authority = Authority(tmp_path)
    cert, key = authority.pair("server")
    token, line = make_token("alice")
    tokens = tmp_path / "tokens"
    tokens.write_text(line + "\n")
    options = {"tls_cert": cert, "tls_key": key, "tokens": str(tokens)}
    trusted = ssl.create_default_context(cafile=authority.path)
    with (
        local_stack(EMULATED, coordinator_options=options) as stack,
        front(stack.address, tls_ca=authority.path, tls_cert=cert, tls_key=key, model_name="m") as address,
        httpx2.Client(verify=trusted) as http,
    ):
        url = f"https://{address}"
        assert http.get(f"{url}/health").json() == {"status": "ok"}
        client = openai.OpenAI(base_url=f"{url}/v1", api_key=token, max_retries=0, http_client=http)
        answer = client.completions.create(model="m", prompt=[1], max_tokens=2)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 2
        with pytest.raises(openai.AuthenticationError) as raised:
            client.with_options(api_key="wrong").completions.create(model="m", prompt=[1])
        assert raised.value.code == "invalid_api_key"
        for given, expected in ((token, 200), ("wrong", 401)):
            for path in ("/v1/models", "/ways"):
                answered = http.get(url + path, headers={"authorization": f"Bearer {given}"})
                assert answered.status_code == expected
        with pytest.raises(httpx2.ConnectError):
            httpx2.get(f"{url}/health")


def test_a_front_that_cannot_start() -> None:
    with (
        front("127.0.0.1:1") as taken,
        pytest.raises(ConfigError, match=f"--address {taken}: cannot be bound"),
        on_own_loop(lambda: server.serving(HttpConfig(address=taken))),
    ):
        pass
    broken = HttpConfig(address="127.0.0.1:0", tls_cert=__file__, tls_key=__file__)
    with (
        pytest.raises(ConfigError, match=r"--tls-cert .* are not a PEM certificate and its private key"),
        on_own_loop(lambda: server.serving(broken)),
    ):
        pass
    with pytest.raises(ConfigError, match=r"--address 0\.0\.0\.0:0: would be plaintext"):
        HttpConfig(address="0.0.0.0:0")
    with pytest.raises(ConfigError, match="--server 10"):
        HttpConfig(server="127.0.0.1:7070,10.0.0.1:7070")
    HttpConfig(server="127.0.0.1:7070,127.0.0.1:7071")
