"""The log of a process, on standard error: lines of text, or one JSON object a line.

A record's `extra` fields follow the message as `name=value` in text, and are fields of the object in JSON:

    log.info("request", extra={"status": "OK", "trace_id": trace_id})
"""

from __future__ import annotations

import faulthandler
import json
import logging
import re
import signal
import sys
import threading
from datetime import UTC, datetime
from types import TracebackType
from typing import Any

from specwire.errors import InvalidRequestError

JSON = "json"
NOTICE = 25
"""Level of what is worth to be read once: what starts, with which settings, and what it waits for."""
logging.addLevelName(NOTICE, "NOTICE")
STACKS_SIGNAL = signal.SIGUSR1
_STDERR = 2
_NO_TEXT = re.compile(r"[-+.0-9eEinfa]{1,32}|True|False|None")
_MAX_FIELD_LEN = 128

_OWN = vars(logging.makeLogRecord({})).keys() | {
    "message",
    "asctime",
    "color_message",  # uvicorn's, for terminals
}
_ERROR = "error: "
_log = logging.getLogger(__name__)


def set_up(level: str, format: str, service: str) -> None:  # noqa: A002 - the flag's name
    """Write records of this level and above to standard error.

    In JSON, warnings and uncaught exceptions are records too.

    Args:
        format: text or json.
        service: the field of that name, in JSON.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(service) if format == JSON else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler])
    if format == JSON:
        logging.captureWarnings(True)
        sys.excepthook = _log_uncaught
        threading.excepthook = lambda args: _log_uncaught(
            args.exc_type, args.exc_value or args.exc_type(), args.exc_traceback
        )


def show_stacks_on_signal() -> None:
    """Write those of all threads to standard error at `STACKS_SIGNAL`, without an end, and at a crash."""
    faulthandler.enable(_STDERR)
    faulthandler.register(STACKS_SIGNAL, _STDERR)


class TextFormatter(logging.Formatter):
    """Time, level, logger, message, extra fields."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        return " ".join([super().formatMessage(record), *(f"{k}={v}" for k, v in _extra(record).items())])


class JsonFormatter(logging.Formatter):
    """One object a line; the time in UTC as RFC 3339 writes it, to the millisecond."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        fields = {
            "time": time.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "service": self._service,
            "pid": record.process,
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            fields["stack"] = record.stack_info
        return json.dumps({**_extra(record), **fields}, ensure_ascii=False, default=str)


def refused(error: InvalidRequestError) -> dict[str, str]:
    """Extra fields of a record about a refusal: which field, its value unless it is a text, and why."""
    is_text = not _NO_TEXT.fullmatch(error.value)
    value = f"{len(error.value)} characters" if is_text else error.value
    return {"field": shown(error.field), "value": value, "reason": error.reason}


def shown(field: str) -> str:
    """The name of a field as records have it: on one line and short, as a client may have made it up.

    >>> shown("chat_template_kwargs.a\\nERROR")
    'chat_template_kwargs.a\\\\nERROR'
    """
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in field[:_MAX_FIELD_LEN])


def report(error: Exception | str) -> None:
    """Write the error that ends a command: as `error: ...`, or as a record where records are JSON."""
    if _is_json():
        _log.error("%s", error, extra={"ends": True})
    else:
        print(f"{_ERROR}{error}", file=sys.stderr)


def reported(line: str) -> str:
    """The error that `report` wrote to this line of a log; empty if it is another line."""
    if line.startswith(_ERROR):
        return line.removeprefix(_ERROR).strip()
    fields = _object(line)
    return str(fields["message"]) if "ends" in fields else ""


def forward(line: str, service: str) -> None:
    """Write a line of a child's standard error to ours.

    Where records are JSON, so is the child's log; what its interpreter and native libraries write themselves
    becomes a record.
    """
    if _is_json() and not _object(line):
        _log.warning("%s", line.rstrip("\n"), extra={"from": service})
    else:
        sys.stderr.write(line)
        sys.stderr.flush()


def _extra(record: logging.LogRecord) -> dict[str, Any]:
    """Names with an underscore are those of libraries that make records, such as Ray."""
    return {name: value for name, value in vars(record).items() if name not in _OWN and name[0] != "_"}


def _is_json() -> bool:
    return any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers)


def _object(line: str) -> dict[str, Any]:
    """The fields of a line that is a JSON object; none if it is not."""
    try:
        fields = json.loads(line)
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) else {}


def _log_uncaught(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    _log.critical("uncaught exception", exc_info=(kind, error, traceback))
