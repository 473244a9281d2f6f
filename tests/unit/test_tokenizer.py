"""Loading tokenizers, their fingerprints, and chat templates."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from specwire.config.stack import UpConfig
from specwire.embedded import TARGET_DIR
from specwire.errors import ConfigError, InvalidRequestError, ModelLoadError, UnsupportedError
from specwire.text.tokenizer import Tokenizer, load, read_chat_template
from tests.support.vocabularies import byte_level_backend

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<s>assistant: {% endif %}"
)

SAID = [{"role": "user", "content": "hello"}]
CALLED = {"role": "assistant", "content": "", "tool_calls": [{}]}
CONVERSATION = '''"""Be brief."""


def answer():
    """Return
    a \'\'\'list\'\'\'."""
    return []


# done
# well


def answer():
'''


def make(added: tuple[str, ...] = (), template: str | None = None) -> PreTrainedTokenizerFast:
    backend = byte_level_backend(["hello world, hello there !"], 280, ["<s>", "</s>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    tokenizer.add_tokens([AddedToken(word) for word in added])
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    make(added=("<tool>",), template=TEMPLATE).save_pretrained(tmp_path)
    return tmp_path


def load_present(source: Path, chat_template: str = "") -> Tokenizer:
    tokenizer = load(source, chat_template=chat_template)
    assert tokenizer is not None
    return tokenizer


def test_special_and_unknown_ids_have_no_text(directory: Path) -> None:
    tokenizer = load_present(directory)
    [hello] = tokenizer.encode("hello")
    assert tokenizer.special_ids == {0, 1}
    assert tokenizer.decode([0, hello, 1, tokenizer.vocab_size, 10**6]) == "hello"
    assert tokenizer.encode("<s>hello") == [0, hello]


def test_vocab_size_counts_added_tokens(directory: Path) -> None:
    tokenizer = load_present(directory)
    assert tokenizer.encode("<tool>") == [tokenizer.vocab_size - 1]


def test_no_tokenizer_is_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert load(tmp_path) is None


@pytest.mark.parametrize("content", ["", "{}", "not json", '{"model": {"type": "BPE"}}'])
def test_a_corrupt_tokenizer_names_its_directory(directory: Path, content: str) -> None:
    (directory / "tokenizer.json").write_text(content)
    with pytest.raises(ModelLoadError, match=str(directory)):
        load(directory)


@pytest.mark.parametrize("source", ["/no/such/directory", "./nowhere/at/all"])
def test_a_missing_directory_is_named(source: str) -> None:
    with pytest.raises(ModelLoadError, match=f"{source} is not a directory"):
        load(source)


def test_a_hub_id_that_cannot_be_had_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelLoadError, match="nobody/no-such-model is neither a directory nor"):
        load("nobody/no-such-model")


def test_an_older_layout_loads_too(tmp_path: Path) -> None:
    make().backend_tokenizer.model.save(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    tokenizer = load_present(tmp_path)
    assert tokenizer.decode(tokenizer.encode("hello there")) == "hello there"


def test_a_stored_truncation_does_not_cut_prompts(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    backend = Backend.from_file(str(directory / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    backend.save(str(directory / "tokenizer.json"))
    with caplog.at_level(logging.WARNING):
        assert len(load_present(directory).encode("hello " * 50)) >= 50
    assert not caplog.records


def test_the_fingerprint_is_the_table(tmp_path: Path) -> None:
    plain, added = Tokenizer(make()), Tokenizer(make(added=("<tool>",)))
    assert len(plain.fingerprint) == 32
    assert plain.fingerprint != added.fingerprint
    assert plain.fingerprint == Tokenizer(make(template=TEMPLATE)).fingerprint
    assert added.fingerprint != Tokenizer(make(added=("<look>",))).fingerprint
    make().save_pretrained(tmp_path)
    assert plain.fingerprint == load_present(tmp_path).fingerprint


def test_the_fingerprint_is_stable_over_processes_without_torch(directory: Path) -> None:
    code = (
        "import sys; from specwire.text.tokenizer import load; t = load(sys.argv[1]);"
        "t.decode(t.encode('x'));"
        "t.apply_chat_template([{'role': 'user', 'content': 'x'}]);"
        "print(t.fingerprint, 'torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code, directory], capture_output=True, text=True, check=True)
    assert run.stdout.split() == [load_present(directory).fingerprint, "False"]


class TestChatTemplate:
    def test_a_conversation_ends_where_the_assistant_begins(self, directory: Path) -> None:
        tokenizer = load_present(directory)
        ids = tokenizer.apply_chat_template(SAID)
        assert tokenizer.decode(ids) == "user: helloassistant: "
        assert [i for i in ids if i in tokenizer.special_ids] == [0, 1, 0]

    def test_tools_are_rendered(self) -> None:
        template = "{% if not tools is defined %}{% set tools = none %}{% endif %}"
        template += "{% generation %}{% endgeneration %}"
        template += "{% for tool in tools %}[{{ tool.function.name }}]{% endfor %}" + TEMPLATE
        tokenizer = Tokenizer(make(template=template))
        tools = [{"type": "function", "function": {"name": "there"}}]
        ids = tokenizer.apply_chat_template(SAID, tools=tools)
        assert tokenizer.decode(ids) == "[there]user: helloassistant: "
        assert tokenizer.tool_template == template

    def test_variables_of_the_template(self) -> None:
        template = "{% set deep = deep | default(false) %}{{ deep }}{{ effort }}" + TEMPLATE
        tokenizer = Tokenizer(make(template=template))
        ids = tokenizer.apply_chat_template(SAID, template_kwargs={"deep": True, "effort": "high"})
        assert tokenizer.decode(ids).startswith("Truehighuser")
        for name in ("shallow", "messages", "tokenize", "chat_template"):
            with pytest.raises(UnsupportedError) as caught:
                tokenizer.apply_chat_template(SAID, template_kwargs={name: "x"})
            assert caught.value.field == f"chat_template_kwargs.{name}"

    @pytest.mark.parametrize(
        ("template", "messages", "tools", "field"),
        [
            (None, SAID, (), "messages"),
            (TEMPLATE, [*SAID, CALLED], (), "messages[1].tool_calls"),
            (TEMPLATE, SAID, [{}], "tools"),
        ],
    )
    def test_what_a_template_does_not_read(
        self, template: Any, messages: Any, tools: Any, field: str
    ) -> None:
        with pytest.raises(UnsupportedError) as caught:
            Tokenizer(make(template=template)).apply_chat_template(messages, tools=tools)
        assert caught.value.field == field

    @pytest.mark.parametrize(
        ("template", "messages", "problem"),
        [
            ("{{ 'x' + tools[0].n }}", SAID, "refuses"),
            (TEMPLATE, [{"role": "tool", "content": "x"}], "no tools here"),
            (TEMPLATE, [], r"messages="),
        ],
    )
    def test_what_is_refused(self, template: str, messages: Any, problem: str) -> None:
        tools = [{"n": 1}] if "tools[0]" in template else ()
        with pytest.raises(InvalidRequestError, match=problem):
            Tokenizer(make(template=template)).apply_chat_template(messages, tools=tools)

    def test_a_file_takes_the_place_of_the_models_own(self, directory: Path, tmp_path: Path) -> None:
        (path := tmp_path / "mine.jinja").write_text("{{ messages[0].content }}!")
        tokenizer = load_present(directory, read_chat_template(path))
        assert tokenizer.decode(tokenizer.apply_chat_template(SAID)) == "hello!"
        assert tokenizer.fingerprint == load_present(directory).fingerprint

    @pytest.mark.parametrize(
        ("content", "problem"),
        [
            (b"{% for m in messages %}", "is no chat template: Unexpected end of template.* in line 1"),
            (b"\xff", "cannot be read"),
        ],
    )
    def test_a_file_that_is_no_template(self, tmp_path: Path, content: bytes, problem: str) -> None:
        (path := tmp_path / "mine.jinja").write_bytes(content)
        with pytest.raises(ConfigError, match=f"--chat-template {path}: {problem}"):
            UpConfig(chat_template=str(path))

    def test_the_embedded_models_own_writes_python(self) -> None:
        """A function with what is asked for as its docstring; nothing that is said closes the string."""
        messages = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": 'Return\na """list""".'},
            {"role": "assistant", "content": "    return []"},
            {"role": "tool", "content": "done\nwell"},
        ]
        tokenizer = load_present(TARGET_DIR)
        assert tokenizer.decode(tokenizer.apply_chat_template(messages)) == CONVERSATION
        answered = tokenizer.apply_chat_template(messages[:2])
        assert tokenizer.decode(answered) == CONVERSATION[: CONVERSATION.index("    return")]
