"""What a running `specwire up` writes on standard error."""

from __future__ import annotations

import json
import logging
import sys
import urllib.request
from datetime import datetime
from typing import Any

import pytest

from specwire.errors import InvalidRequestError
from specwire.telemetry import logs
from tests.support.processes import Command, running, wait_until

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
UP = ("up", "--target", "emulated:step_ms=1", "--draft", "emulated:step_ms=0.2", "--address", "127.0.0.1:0")
FRONT = ("--http-address", "127.0.0.1:0")
SERVICES = {"up", "verify", "draft", "coordinator", "http"}


def records(command: Command) -> list[dict[str, Any]]:
    """Every line, which is one object."""
    found = [json.loads(line) for line in command.errors().splitlines()]
    for each in found:
        assert datetime.fromisoformat(each["time"]).utcoffset() is not None
        assert each.keys() >= {"level", "logger", "message", "service", "pid"}
    return found


def ask(address: str, path: str, trace: str) -> None:
    headers = {"x-request-id": "mine", "traceparent": f"00-{trace}-{SPAN}-01"}
    with urllib.request.urlopen(urllib.request.Request(f"http://{address}{path}", headers=headers)) as answer:
        assert answer.status == 200
        answer.read()


@pytest.mark.slow
def test_every_line_of_every_service_is_an_object() -> None:
    with running(*UP, *FRONT, "--log-level", "debug", "--log-format", "json") as up:
        up.ready_line()
        page = up.line().removeprefix("page http://").strip().rstrip("/")
        ask(page, "/health?secret=1", TRACE)
        wait_until(lambda: any(each["message"] == "access" for each in records(up)), 10)
        up.services["coordinator"].send_signal(logs.STACKS_SIGNAL)  # text of the interpreter's own
        wait_until(lambda: any(each.get("from") == "coordinator" for each in records(up)), 10)
        up.services["draft_service"].kill()
        wait_until(lambda: any("it starts again" in each["message"] for each in records(up)), 10)
        up.process.terminate()
        assert up.ended() == 0
        found = records(up)
    assert {each["service"] for each in found} == SERVICES
    assert len({each["pid"] for each in found}) >= len(SERVICES), "and of the next draft service, perhaps"
    [access] = [each for each in found if each["message"] == "access"]
    wanted = {"level": "info", "method": "GET", "path": "/health", "status": 200, "client": "loopback"}
    assert wanted.items() <= access.items()
    assert (access["request_id"], access["trace_id"]) == ("mine", TRACE)
    assert access["duration_ms"] > 0
    assert access["bytes"] == len('{"status":"ok"}')
    told = [each for each in found if each["service"] != "http" or each["level"] != "debug"]
    assert "secret" not in json.dumps(told)


def test_an_up_that_cannot_start_says_so_in_an_object() -> None:
    words = ("up", "--target", "emulated:nonsense=1", "--draft", "none", "--log-format", "json")
    with running(*words, "--address", "127.0.0.1:0") as up:
        assert up.ended() == 2
        [only] = records(up)
    assert (only["level"], only["service"]) == ("error", "up")
    assert "--target emulated:nonsense=1" in only["message"]


def test_an_object_has_extra_fields_and_the_exception_in_one_string() -> None:
    try:
        raise ValueError("line one\nline two")
    except ValueError:
        error = sys.exc_info()
    made = logging.makeLogRecord({"name": "n", "levelname": "ERROR", "msg": "%s of %d", "exc_info": error})
    made.args = ("one", 2)
    made.created = 0.0625
    made.__dict__ |= {"trace_id": TRACE, "odd": object, "level": "not the record's"}
    line = logs.JsonFormatter("draft").format(made)
    assert "\n" not in line
    fields = json.loads(line)
    assert fields["time"] == "1970-01-01T00:00:00.062Z"
    assert (fields["message"], fields["level"], fields["trace_id"]) == ("one of 2", "error", TRACE)
    assert fields["exception"].endswith("ValueError: line one\nline two")


def test_a_field_that_a_client_made_up_stays_on_its_line_and_short() -> None:
    error = InvalidRequestError("kwargs.a\nerror: forged\u2028" + "x" * 1000, 1, "is unknown")
    field = logs.refused(error)["field"]
    assert field.startswith(r"kwargs.a\nerror: forged\u2028xxx")
    assert len(field) < 200
    assert logs.shown("logit_bias['ä']") == "logit_bias['ä']"


def test_what_an_error_of_a_child_is_read_from() -> None:
    assert logs.reported("error: --model x: no such model\n") == "--model x: no such model"
    assert logs.reported("2026-01-01 INFO n: error: none\n") == ""
    assert logs.reported('{"level": "error", "message": "of another kind"}\n') == ""
