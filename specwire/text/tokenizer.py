"""Text to token ids and back, for every process that handles text. Imports no torch.

`transformers.AutoTokenizer` would import torch (about 2 s), so a model that has a `tokenizer.json` is read
through `PreTrainedTokenizerFast`, which does not. Only older layouts go through `AutoTokenizer`.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from specwire.errors import (
    ConfigError,
    ContextLengthError,
    InvalidRequestError,
    ModelLoadError,
    UnsupportedError,
)

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "sentencepiece.bpe.model",
    "spiece.model",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
)
_COMPANION_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
    "merges.txt",
    "special_tokens_map.json",
)
FILES = (*_TOKENIZER_FILES, *_COMPANION_FILES)
"""What a tokenizer may be loaded from."""

_GENERATION = re.compile(r"{%-?\s*(end)?generation\s*-?%}")
"""A tag of transformers' own, which marks the assistant's tokens."""


class Tokenizer:
    """The part of a model's tokenizer that serving needs. Thread-safe."""

    def __init__(self, backend: Any) -> None:
        """Wrap a transformers tokenizer; most callers want `load`."""
        from transformers import PreTrainedTokenizerFast

        self._backend = backend
        self._fast = backend.backend_tokenizer if type(backend) is PreTrainedTokenizerFast else None
        if self._fast is not None:  # as transformers does before each text
            self._fast.no_truncation()
            self._fast.no_padding()
            self._fast.encode_special_tokens = backend.split_special_tokens

    @cached_property
    def table(self) -> Mapping[str, int]:
        """Token → id, including added tokens; cached, as it is costly to build."""
        return dict(self._backend.get_vocab())

    @cached_property
    def vocab_size(self) -> int:
        """Highest token id plus one, including added tokens; a model may pad its vocabulary beyond it."""
        return max(self.table.values(), default=-1) + 1

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that stand for no text (begin, end, padding, roles): `decode` skips them."""
        added = self._backend.added_tokens_decoder
        return frozenset(self._backend.all_special_ids) | {i for i, token in added.items() if token.special}

    @property
    def eos_id(self) -> int | None:
        """The end token; None without one."""
        eos_id: int | None = self._backend.eos_token_id
        return eos_id

    @cached_property
    def added_ids(self) -> frozenset[int]:
        """Added tokens, special or not: they are written as they are, not in the tokenizer's alphabet."""
        return frozenset(self._backend.added_tokens_decoder)

    @cached_property
    def decoder(self) -> Mapping[str, Any]:
        """How tokens become text, as in `tokenizer.json`; empty where that is not known."""
        decoder = self._fast.decoder if self._fast is not None else None
        return json.loads(decoder.__getstate__()) if decoder is not None else {}

    @cached_property
    def fingerprint(self) -> str:
        """32 hex digits that are equal if and only if the token → id tables of two tokenizers are equal.

        The first 16 bytes of the SHA-256 of the sorted table. It includes added tokens, but not the padding
        of the model's vocabulary, the file layout or the chat template.
        """
        table = json.dumps(sorted(self.table.items()), separators=(",", ":"))
        return hashlib.sha256(table.encode()).digest()[:16].hex()

    def encode(self, text: str, add_special_tokens: bool = True, *, max_len: int | None = None) -> list[int]:
        """Token ids of `text`, with the special tokens that the model expects (often a begin token).

        Releases the GIL but for about 20 ms a million tokens, where transformers holds it for 200.

        Args:
            max_len: most tokens, over which it raises ContextLengthError; None for no limit.
        """
        if self._fast is not None:  # its `encode` holds the GIL
            [found] = self._fast.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        else:
            # verbose: instead of a warning about the model's length, ContextLengthError is raised.
            found = self._backend.encode(text, add_special_tokens=add_special_tokens, verbose=False)
        if max_len is not None and len(found) > max_len:
            raise ContextLengthError("prompt", f"{len(found)} tokens", f"is over the context of {max_len}")
        return list(found if self._fast is None else found.ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`, without ids that have no token, and special tokens; spaces are kept."""
        if self._fast is not None:  # what its `decode` comes to, which takes four times as long
            return str(self._fast.decode(token_ids, skip_special_tokens=skip_special_tokens))
        return str(
            self._backend.decode(
                token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )
        )

    def names(self, token_ids: Sequence[int]) -> list[str]:
        """Each token as the vocabulary writes it; U+FFFD for an id that has none."""
        found = self._backend.convert_ids_to_tokens(list(token_ids))
        return [name if isinstance(name, str) else "\ufffd" for name in found]

    def spell(self, token_id: int) -> str:
        """One token for display: special tokens by their names, U+FFFD where it is part of a character."""
        return str(self._backend.decode([token_id], clean_up_tokenization_spaces=False))

    @cached_property
    def tool_template(self) -> str:
        """The chat template of conversations with tools: one named `tool_use` if there is, else the only one.

        Empty without a template.
        """
        if not self._backend.chat_template:
            return ""
        return str(self._backend.get_chat_template(tools=[{}]))

    @cached_property
    def renders_tools(self) -> bool:
        """Whether that template reads `tools`."""
        return "tools" in _known_variables(self.tool_template)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        max_len: int | None = None,
    ) -> list[int]:
        """Token ids of a conversation; `max_len` as above.

        Args:
            messages: with role and content, both text, and what else the template reads of them.
            add_generation_prompt: whether they go on to the start of the assistant's next message.
            tools: as OpenAI's API has them, for the template to describe to the model.
            template_kwargs: further variables of the template.

        Raises:
            ContextLengthError: there are more than `max_len`.
            InvalidRequestError: no message, or refused by the template.
            UnsupportedError: the tokenizer has no chat template, or one that does not read the tools, one of
                the variables, or a field of a message.
        """
        if not messages:
            raise InvalidRequestError("messages", messages, "must be a list of at least one message")
        if not self._backend.chat_template:
            raise UnsupportedError("messages", f"{len(messages)} messages", "this model has no chat template")
        if tools and not self.renders_tools:
            problem = "the model's chat template does not render tools"
            raise UnsupportedError("tools", f"{len(tools)} tools", problem)
        variables = template_kwargs or {}
        template = str(self._backend.get_chat_template(tools=[{}] if tools else None))
        self._check_variables(variables, template)
        _check_fields(messages, template)
        try:
            text = self._backend.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] or None,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **variables,
            )
        except Exception as error:  # a template computes with what the request says
            problem = f"the model's chat template refuses them: {error}"
            raise InvalidRequestError("messages", f"{len(messages)} messages", problem) from None
        # The template adds its own special tokens.
        return self.encode(text, add_special_tokens=False, max_len=max_len)

    def _check_variables(self, names: Iterable[str], template: str) -> None:
        """The arguments of transformers' own are no variables of a template."""
        if not names:
            return
        reserved = {"messages", *inspect.signature(self._backend.apply_chat_template).parameters}
        known = _known_variables(template) - reserved
        for name in names:
            if name not in known:
                problem = "the model's chat template does not read it"
                raise UnsupportedError(f"chat_template_kwargs.{name}", "given", problem)


def _check_fields(messages: Sequence[Mapping[str, Any]], template: str) -> None:
    """What a template does not read would be lost; but for an id, which the order of messages implies."""
    known = {"role", "content", "tool_call_id"}
    for index, message in enumerate(messages):
        for name in message.keys() - known:
            if not re.search(rf"\b{re.escape(name)}\b", template):
                problem = "the model's chat template does not read it"
                raise UnsupportedError(f"messages[{index}].{name}", "given", problem)
            known.add(name)


def _known_variables(template: str) -> set[str]:
    """What a template reads of its arguments; none if it is invalid, which rendering reports."""
    try:
        return template_variables(template)
    except ValueError:
        return set()


def read_chat_template(path: str | Path) -> str:
    """The text of a file with a chat template (Jinja); ConfigError if it cannot be read, or is none."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from None
    try:
        template_variables(text)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None
    return text


def template_variables(template: str) -> set[str]:
    """What a chat template reads of its arguments; ValueError if it is no Jinja template."""
    from jinja2 import Environment, TemplateSyntaxError, meta

    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        return meta.find_undeclared_variables(environment.parse(_GENERATION.sub("", template)))
    except TemplateSyntaxError as error:
        raise ValueError(f"is no chat template: {error.message} in line {error.lineno}") from None


def load(source: str | Path, *, chat_template: str = "") -> Tokenizer | None:
    """Load the tokenizer of a model directory or hub id; None when the model has none.

    Code in a model directory is never run.

    Args:
        chat_template: instead of the model's own, if it has one (Jinja).

    Raises:
        ModelLoadError: `source` does not exist, or its tokenizer files are invalid.
    """
    directory = directory_of(str(source))
    return load_from(directory, f"in {directory}", chat_template=chat_template)


def load_from(directory: Path, where: str, *, chat_template: str = "") -> Tokenizer | None:
    """As `load`; errors name it by `where` it is from."""
    if not any((directory / name).is_file() for name in _TOKENIZER_FILES):
        return None
    try:
        backend = _load_backend(directory)
        backend.chat_template = chat_template or backend.chat_template
        tokenizer = Tokenizer(backend)
        _ = tokenizer.vocab_size, tokenizer.special_ids
    except Exception as error:  # the readers below raise many types
        problem = f"{type(error).__name__}: {error}"
        raise ModelLoadError(f"the tokenizer {where} cannot be loaded ({problem})") from error
    return tokenizer


def directory_of(source: str) -> Path:
    """The local directory of a model, downloaded from the hub if necessary; ModelLoadError without one."""
    if Path(source).is_dir():
        return Path(source)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(snapshot_download(source, allow_patterns=[*FILES]))
    except HFValidationError:
        raise ModelLoadError(f"{source} is not a directory") from None
    except Exception as error:
        raise ModelLoadError(f"{source} is neither a directory nor can the hub serve it: {error}") from error


def _load_backend(directory: Path) -> Any:
    if (directory / "tokenizer.json").is_file():
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(directory)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
