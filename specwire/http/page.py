"""The demo page: one self-contained document.

Styles and script are inline; the Content-Security-Policy admits them by their hashes, and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib import resources

from specwire.config.speculative import FROM_TEXT

_SCRIPTS = {"{live}": "page_live.js", "{ways}": "page_ways.js", "{js}": "page.js"}
_FILES = {"{css}": "page.css", **_SCRIPTS}


@cache
def html() -> str:
    document = _source("page.html").replace("{methods}", " ".join(FROM_TEXT))
    for name, file in _FILES.items():
        document = document.replace(name, _source(file))
    return document


def _source(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _hash(name: str) -> str:
    digest = hashlib.sha256(_source(name).encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


HEADERS = {
    "content-security-policy": "; ".join(
        (
            "default-src 'none'",
            "connect-src 'self'",
            "img-src data:",
            f"style-src {_hash('page.css')}",
            f"script-src {' '.join(map(_hash, _SCRIPTS.values()))}",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    ),
    "cache-control": "no-cache",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
