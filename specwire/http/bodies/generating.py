"""What the bodies of generating APIs share.

A parameter without effect here is accepted if OpenAI's clients usually send it and it does not change the
output; one of an unsupported feature is accepted only at the value that disables the feature.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal

import pydantic
from pydantic import Field

from specwire.core import KINDS, PARAMETERS, Rule, SamplingParams
from specwire.errors import InvalidRequestError
from specwire.http.bodies.part import JsonObject, List, RequestBody, invalid
from specwire.http.bodies.structured import Structured
from specwire.text.grammar import Grammar

MAX_CHOICES = 128
"""Generations of one request, over all its prompts."""
_MAX_ID_LEN = 10
_SAID_ELSEWHERE = {
    *("max_tokens", "grammar", "logprobs", "prompt_logprobs", "num_beams", "num_return_sequences"),
    *("presence_penalty", "frequency_penalty", "logit_bias", "stop", "length_penalty", "early_stopping"),
    "adapter",
}
"""Parameters that not every API has, or that one has in a form of its own."""
_FORMS: dict[str, Any] = {
    "top_k": Annotated[int, Field(ge=-1)],
    "stop_token_ids": List[int],
    "rule": Annotated[Rule, Field(strict=False)],
    "cache_salt": Annotated[str, Field(min_length=1)],
}
"""Of the others, those that are not one number, switch or text, or have narrower bounds here."""

if TYPE_CHECKING:
    from specwire.http.bodies.part import RequestBody as WithParameters
else:
    WithParameters = pydantic.create_model(
        "WithParameters",
        __base__=RequestBody,
        **{
            name: ((_FORMS.get(name) or KINDS[name]) | None, Field(None, description=each.metadata["doc"]))
            for name, each in PARAMETERS.items()
            if name not in _SAID_ELSEWHERE
        },
    )


class StreamOptions(JsonObject):
    """Options of a streamed response."""

    include_obfuscation: Literal[False] | None = None


class UsageOptions(StreamOptions):
    """The same, where the counts are no part of it."""

    include_usage: bool | None = None


def check_stream_options(stream: bool | None, options: StreamOptions | None) -> None:
    """Refuse options of a stream that is not asked for."""
    if options is not None and not stream:
        raise invalid("stream_options", "is only for requests with stream=true")


class Sampled(WithParameters):
    """How to generate, in every API: the parameters, and what clients send besides."""

    model: str
    stream: bool | None = None
    # without effect on the output
    user: Any = None
    metadata: Any = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    prompt_cache_key: Any = None
    safety_identifier: Any = None

    @property
    def reports_progress(self) -> bool:
        """Whether each chunk of a stream reports the round's draft tokens, speculation and timing."""
        return False

    @property
    def names(self) -> dict[str, str]:
        """This API's names of parameters of the SDK, which errors of services name."""
        return {}

    def renamed(self, error: Exception) -> Exception:
        """The error with the name that its field has in this API."""
        if isinstance(error, InvalidRequestError):
            for name, here in self.names.items():
                rest = error.field.removeprefix(name)
                if rest != error.field and rest[:1] in ("", ".", "[", " "):
                    return type(error)(here + rest, error.value, error.problem)
        return error

    @property
    def num_runs(self) -> int:
        """Generations to run for each prompt."""
        return 1

    @cached_property
    def grammar(self) -> Grammar | None:
        """What the output must match; None for any text."""
        raise NotImplementedError

    def params(self, **defaults: Any) -> SamplingParams:
        """Sampling parameters of the first choice; InvalidRequestError names the parameter and its value.

        Args:
            defaults: of the model, for what the body does not say.
        """
        try:
            return SamplingParams(**{**defaults, **self.given, **self.own_params()})
        except InvalidRequestError as error:
            raise self.renamed(error) from None

    @property
    def given(self) -> dict[str, Any]:
        """The parameters that are in the body under their names."""
        return {name: value for name in PARAMETERS if (value := getattr(self, name, None)) is not None}

    def own_params(self) -> dict[str, Any]:
        """The parameters that an API has in a form of its own."""
        return {"top_k": max(0, self.given["top_k"])} if "top_k" in self.given else {}


class Body(Structured, Sampled):
    """Fields of completions, of a prompt or a conversation."""

    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream_options: UsageOptions | None = None
    max_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, Any] | None = None
    stop: str | List[str] | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    return_fates: bool | None = None

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with a chunk for the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def reports_progress(self) -> bool:
        return bool(self.stream and self.return_fates)

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def names(self) -> dict[str, str]:
        own = {"num_beams": "n", "num_return_sequences": "n"}
        if self.grammar is not None:
            [name] = self.asked
            own |= {f"grammar.{self.grammar.kind}": name, "grammar": name}
        return super().names | own

    @property
    def num_runs(self) -> int:
        return 1 if self.use_beam_search else self.num_choices  # one search has all choices of its prompt

    def params(self, **defaults: Any) -> SamplingParams:
        return super().params() if self.use_beam_search else super().params(**defaults)

    def own_params(self) -> dict[str, Any]:
        biases = self.logit_bias or {}
        for key, bias in biases.items():
            if not (key.isascii() and key.isdecimal() and len(key) <= _MAX_ID_LEN):
                raise InvalidRequestError(f"logit_bias[{key[:20]!r}]", bias, "must be keyed by token ids")
        own = super().own_params() | {"logit_bias": {int(key): bias for key, bias in biases.items()}}
        if self.use_beam_search:  # its n texts are the choices; temperature 0 goes without saying
            own |= {"num_beams": self.num_choices, "num_return_sequences": self.num_choices}
            own["temperature"] = self.given.get("temperature", 0)
        return own

    def check(self) -> None:
        super().check()
        check_stream_options(self.stream, self.stream_options)
        if not self.use_beam_search:
            for name in ("length_penalty", "early_stopping"):
                if name in self.given:
                    raise invalid(name, "is only for requests with use_beam_search=true")
            return
        if self.num_choices < 2:
            raise invalid("n", "is the number of beams with use_beam_search=true: at least 2")
        for name in ("stream", "return_fates"):
            if getattr(self, name):
                raise invalid(name, "must be false with use_beam_search=true")
