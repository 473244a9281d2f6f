"""LiteLLM's calls on a server: prints, as JSON, each text as it was streamed and as a whole.

with_litellm.py BASE_URL MODEL
"""

from __future__ import annotations

import json
import sys
from typing import Any

import litellm  # type: ignore[import-not-found]


def main(base_url: str, model: str) -> None:
    """Each API twice, with one seed."""
    common: dict[str, Any] = {"api_base": base_url, "api_key": "none", "seed": 5, "max_tokens": 12}
    said = [{"role": "user", "content": "What is a queue?"}]
    told = {}
    for provider in ("openai", "hosted_vllm"):
        name = f"{provider}/{model}"
        chunks = litellm.completion(model=name, messages=said, stream=True, **common)
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        whole = litellm.completion(model=name, messages=said, **common)
        assert whole.usage.completion_tokens == 12
        told[f"{provider} chat"] = (streamed, whole.choices[0].message.content)
    name = f"text-completion-openai/{model}"
    chunks = litellm.text_completion(model=name, prompt="def f(", stream=True, **common)
    streamed = "".join(chunk.choices[0].text or "" for chunk in chunks)
    told["completion"] = (
        streamed,
        litellm.text_completion(model=name, prompt="def f(", **common).choices[0].text,
    )
    told["responses"] = responses(f"openai/{model}", base_url)
    json.dump(told, sys.stdout)


def responses(model: str, base_url: str) -> tuple[str, str]:
    """A text of the newer API, greedy, streamed and whole."""
    asked: dict[str, Any] = {"model": model, "input": "What is a queue?", "max_output_tokens": 12}
    asked |= {"temperature": 0, "api_base": base_url, "api_key": "none"}
    deltas = [
        event
        for event in litellm.responses(**asked, stream=True)
        if event.type == "response.output_text.delta"
    ]
    whole = litellm.responses(**asked)
    return "".join(event.delta for event in deltas), whole.output[0].content[0].text


if __name__ == "__main__":
    main(*sys.argv[1:])
