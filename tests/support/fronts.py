"""HTTP fronts of running stacks, inside the test process, and pairs whose tokenizer knows conversations."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai

from specwire import embedded
from specwire.config.client import HttpConfig
from specwire.http import server
from tests.support.harness import LocalStack, LoopThread, local_stack

CHAT_TEMPLATE = (
    "{% if reasoning_effort is defined %}# effort {{ reasoning_effort }}\n{% endif %}"
    "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n"
    "{% for call in m.tool_calls %}# {{ call.function.name }}({{ call.function.arguments.city }})\n"
    "{% endfor %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}# assistant:{% endif %}"
)


@contextlib.contextmanager
def front(address: str, **options: Any) -> Iterator[str]:
    """A front of the coordinator at `address`; yields its own HOST:PORT."""
    with contextlib.ExitStack() as stack:
        thread = LoopThread()
        stack.callback(thread.close)
        options.setdefault("grace_s", 0.0)
        config = HttpConfig(address="127.0.0.1:0", server=address, **options)
        yield stack.enter_context(thread.entered(lambda: server.serving(config)))


class Fronted:
    """A stack, its front, and OpenAI's client of that front."""

    def __init__(self, stack: LocalStack, address: str) -> None:
        self.stack = stack
        self.address = address
        self.url = f"http://{address}"
        self.openai = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)
        self.model = self.openai.models.list().data[0].id


@contextlib.contextmanager
def fronted(
    target: Path | str, draft: Path | str | None = None, *, front_options: Any = None, **options: Any
) -> Iterator[Fronted]:
    """A stack with a front, which has options of its own; the others are those of `local_stack`."""
    with (
        local_stack(target, draft, **options) as stack,
        front(stack.address, **front_options or {}) as address,
    ):
        running = Fronted(stack, address)
        with running.openai:
            yield running


def save_chat_target(directory: Path) -> Path:
    """The embedded target with a shorter chat template."""
    shutil.copytree(embedded.TARGET_DIR, directory)
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return directory
