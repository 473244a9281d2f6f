"""Flags, variables and defaults: where a value comes from, and what is refused by which name."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from specwire.cli.serve import about_draft
from specwire.config import cuda, flags, models
from specwire.config import services as config
from specwire.config.client import ClientConfig, HttpConfig
from specwire.config.environment import ALL_CONFIGS, check_environment
from specwire.config.fields import split_address
from specwire.config.flags import env_name, flag_name, flag_words, read_config, settings_of
from specwire.config.link import Link, ProxyConfig
from specwire.config.parser import TITLES, add_config_file, add_flags
from specwire.config.serve import ServeConfig
from specwire.config.services import CoordinatorConfig, DraftConfig, VerifyConfig
from specwire.config.speculative import METHODS, SpeculativeConfig
from specwire.config.stack import UpConfig
from specwire.errors import ConfigError, ModelLoadError

FIELDS = [
    (kind, field) for kind in ALL_CONFIGS for field in settings_of(kind) if "secret" not in field.metadata
]
IDS = [f"{kind.__name__}.{field.name}" for kind, field in FIELDS]

SHARES = ("support_mass", "kv_cache_memory", "gpu_memory_utilization", "learn_share", "draft_learn_share")
GO_TOGETHER = {
    "tls_cert": ["tls_key"],
    "tls_key": ["tls_cert"],
    "tls_client_ca": ["tls_cert", "tls_key"],
    "peer_cert": ["peer_key", "peer_ca"],
    "peer_key": ["peer_cert", "peer_ca"],
    "peer_server_name": ["peer_ca"],
    "client_cert": ["client_key"],
    "client_key": ["client_cert"],
}


def parse(kind: type[Any], *argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_config_file(parser)
    add_flags(parser, kind)
    return parser.parse_args(argv)


def words(kind: type[Any], name: str, value: Any) -> list[str]:
    return [value] if (kind, name) == (ServeConfig, "target") else flag_words(**{name: value})


def another_value(field: dataclasses.Field[Any]) -> Any:
    """Valid, and not the default."""
    if field.name in SHARES:
        return 0.5
    if isinstance(field.default, bool):
        return not field.default
    if isinstance(field.default, int | float):
        return field.default + 1
    return another_text(field)


def another_text(field: dataclasses.Field[Any]) -> str:
    numbers = {"num_draft_tokens": "5", "num_outcomes": "5", "max_depth": "5"}
    named = {"log_level": "error", "log_format": "json", "metrics_names": "vllm"}
    named |= {"rule": "gumbel", "draft": "none", "layers": "a3"} | numbers
    named |= dict.fromkeys(("device", "draft_device"), "cuda:1")
    named |= {"host": "localhost", "cors_origin": "https://app.example", "metrics_from": "localhost:81"}
    named |= {"tool_call_parser": "mistral", "lora_modules": f"mine={Path(__file__).parent}"}
    named["sampling_defaults"] = "openai"
    named["draft_placement"] = "auto" if field.default == "service" else "service"
    named["speculative_config"] = '{"num_speculative_tokens": 5}'
    if field.name.endswith("dtype"):
        return "bfloat16"
    if field.metadata["metavar"] == "FILE":
        return __file__
    if field.name.endswith(("address", "server", "listen", "to")):
        return "localhost:81"
    return named.get(field.name, "org/model")


KUBERNETES = {
    "SPECWIRE_SERVICE_HOST": "10.0.0.1",
    "SPECWIRE_SERVICE_PORT": "7070",
    "SPECWIRE_SERVICE_PORT_GRPC": "7070",
    "SPECWIRE_PORT": "tcp://10.0.0.1:7070",
    "SPECWIRE_PORT_7070_TCP": "tcp://10.0.0.1:7070",
    "SPECWIRE_PORT_7070_TCP_PROTO": "tcp",
    "SPECWIRE_PORT_7070_TCP_PORT": "7070",
    "SPECWIRE_PORT_7070_TCP_ADDR": "10.0.0.1",
    "SPECWIRE_DRAFT_SERVICE_HOST": "10.0.0.2",
    "SPECWIRE_DRAFT_PORT": "tcp://10.0.0.2:7071",
    "SPECWIRE_DRAFT_PORT_7071_TCP_ADDR": "10.0.0.2",
}
"""What Kubernetes sets in a pod beside Services called `specwire` and `specwire-draft`."""


class TestSources:
    @pytest.mark.parametrize(("kind", "field"), FIELDS, ids=IDS)
    def test_every_field_has_a_flag_a_variable_and_a_key(
        self, kind: type[Any], field: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        free = "specwire.config.serve.ports.are_free"
        monkeypatch.setattr(free, lambda *_: True)  # others take and free some meanwhile
        value = another_value(field)
        needed: dict[Any, dict[str, Any]] = {
            (UpConfig, "target"): {"draft": "none"},
            (ProxyConfig, "jitter_ms"): {"rtt_ms": 2.0},
            (DraftConfig, "learn_out"): {"learn": True},
            **{
                (one, "ray_address"): {"tensor_parallel_size": 2}
                for one in (DraftConfig, VerifyConfig, UpConfig)
            },
        }
        files = dict.fromkeys(GO_TOGETHER.get(field.name, ()), __file__)
        extra = needed.get((kind, field.name), files)
        if kind is ServeConfig and field.name != "target":
            extra = {"target": "embedded"} | needed.get((UpConfig, field.name), extra)
        expected = kind(**extra | {field.name: value})
        fixed = [part for name, text in extra.items() for part in words(kind, name, text)]
        by_flag = read_config(kind, parse(kind, *fixed, *words(kind, field.name, value)), {})
        by_variable = read_config(kind, parse(kind, *fixed), {env_name(field.name): str(value)})
        (path := tmp_path / "flags.yaml").write_text(json.dumps({field.name: value}))  # which is YAML too
        by_file = read_config(kind, parse(kind, "--config", str(path), *fixed), {})
        assert by_flag == by_variable == by_file == expected
        assert getattr(expected, field.name) != field.default
        assert field.metadata["doc"]

    def test_a_flag_beats_the_variable_and_the_variable_the_default(self) -> None:
        environ = {"SPECWIRE_TIMEOUT_S": "7"}
        assert read_config(ClientConfig, parse(ClientConfig), {}).timeout_s == 120
        assert read_config(ClientConfig, parse(ClientConfig), environ).timeout_s == 7
        args = parse(ClientConfig, "--timeout-s", "8")
        for text in ("7", "soon"):
            assert read_config(ClientConfig, args, {"SPECWIRE_TIMEOUT_S": text}).timeout_s == 8


def written(directory: Path, text: str) -> argparse.Namespace:
    (path := directory / "flags.yaml").write_text(text)
    return argparse.Namespace(config=str(path))


class TestFiles:
    def test_flags_and_variables_win_over_a_file(self, tmp_path: Path) -> None:
        args = written(tmp_path, "num-draft-tokens: 4\nrule: gumbel\ndraft: none\n")
        args.rule = "block"
        read = read_config(UpConfig, args, {"SPECWIRE_DRAFT": "ngram"})
        assert (read.num_draft_tokens, read.rule, read.draft) == ("4", "block", "ngram")

    def test_other_names_and_values_that_are_no_text(self, tmp_path: Path) -> None:
        text = "model: embedded\nmax-num-seqs: 8\ngpu_memory_utilization: 0\nenable_prefix_caching: false\n"
        text += (
            "speculative_config: {method: ngram}\ncors_origin: ['https://a.example', 'https://b.example']\n"
        )
        read = read_config(ServeConfig, written(tmp_path, text), {})
        assert (read.target, read.max_running, read.prefix_sharing) == ("embedded", 8, False)
        assert read.speculative_config == '{"method": "ngram"}'
        assert read.cors_origin == "https://a.example,https://b.example"

    @pytest.mark.parametrize(
        ("text", "problem"),
        [
            ("num_draft_token: 4", ": num_draft_token: is not known; did you mean num_draft_tokens"),
            ("num_draft_tokens: 99999", "flags.yaml: num_draft_tokens: 99999: must lie in"),
            ("replicas: many", ": replicas: must be a whole number"),
            ("replicas: true", ": replicas: must be a whole number"),
            ("suffix_shared: 1", ": suffix_shared: must be true or false"),
            ("grace_s: soon", ": grace_s: must be a number"),
            ("draft: no", ": draft: must be text; quote it"),
            ("rule: block\nrule-: x", ": rule-: is not known"),
            ("http-address: ''\nhttp_address: ''", ": http_address: is given twice"),
            ("replicas: 1\nreplicas: 2", ": replicas: is given twice"),
            ("speculative_config: {method: ngram, method: suffix}", ": method: is given twice"),
            ("speculative_config: {method: 2024-01-01}", ": speculative_config: is no JSON"),
            ("[" * 3000, "is nested too deeply"),
            ("least_pass_ms: 1.0e+300", ": least_pass_ms: 1e\\+300: must be a number in"),
            (f"num_draft_tokens: {'9' * 5000}", r"flags.yaml: cannot be read \(Exceeds the limit"),
            (f"num_draft_tokens: '{'9' * 5000}'", ": num_draft_tokens: 9+: is neither a number"),
            ("[a]", "is no mapping"),
            ("a: [", "is not YAML in line 1"),
        ],
    )
    def test_what_is_refused(self, tmp_path: Path, text: str, problem: str) -> None:
        with pytest.raises(ConfigError, match=problem):
            read_config(UpConfig, written(tmp_path, text), {})

    def test_a_switch_that_is_off_beside_what_implies_it(self) -> None:
        given = argparse.Namespace(tls=False, server_name="x")
        with pytest.raises(ConfigError, match="--no-tls: is given with --server-name"):
            read_config(ClientConfig, given, {})
        with pytest.raises(ConfigError, match="--no-tls: is given with --server-name"):
            read_config(
                ClientConfig, argparse.Namespace(), {"SPECWIRE_TLS": "0", "SPECWIRE_SERVER_NAME": "x"}
            )

    def test_a_missing_file(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="--config: names no file"):
            read_config(UpConfig, argparse.Namespace(config=""), {})
        with pytest.raises(ConfigError, match=r"--config .*: cannot be read"):
            read_config(UpConfig, argparse.Namespace(config=str(tmp_path / "none.yaml")), {})


class TestServe:
    def serve(self, **options: Any) -> ServeConfig:
        return ServeConfig(**{"target": "embedded"} | options)

    def test_what_drafts_by_default(self) -> None:
        assert self.serve().named.model == "embedded"
        other = self.serve(target="org/model")
        assert (other.named.model, other.coordinator_speculation) == ("none", '{"method": "ngram"}')
        assert about_draft(other) == "draft ngram, the default; --draft none serves the target alone"
        assert about_draft(self.serve(draft="suffix")) == "draft suffix"
        alone = self.serve(draft="none")
        assert (alone.named.model, alone.coordinator_speculation) == ("none", "")
        assert about_draft(alone) == "draft none: the target alone, served plainly"
        given = self.serve(target="org/model", speculative_config='{"method": "suffix"}')
        assert given.coordinator_speculation == '{"method": "suffix"}'
        assert "the default" not in about_draft(given)

    @pytest.mark.parametrize(("is_usable", "device"), [(True, "cuda"), (False, "cpu")])
    def test_the_device_by_default(
        self, is_usable: bool, device: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(cuda, "is_usable", lambda: is_usable)
        assert (self.serve().device, self.serve().draft_device) == (device, device)
        assert self.serve(draft_device="cpu").draft_device == "cpu"

    def test_names_of_vllm_on_the_command_line(self) -> None:
        args = ["embedded", "--no-enable-prefix-caching", "--max-num-seqs", "3", "--served-model-name", "m"]
        read = read_config(ServeConfig, parse(ServeConfig, *args), {})
        assert (read.prefix_sharing, read.max_running, read.model_name) == (False, 3, "m")

    def test_every_flag_of_its_own_reaches_a_service(self) -> None:
        here = {"target", "draft", "host", "port", "api_key"}
        own = {f.name for f in settings_of(ServeConfig)} - {f.name for f in settings_of(UpConfig)}
        config = self.serve(max_model_len=7, max_running=5, lenient=True)
        parts = (config.verify(), config.coordinator(), config.front())
        for name in own - here:
            value = getattr(config, name)
            assert value in [getattr(part, name) for part in parts if hasattr(part, name)], name

    def test_where_the_api_listens(self) -> None:
        assert self.serve().http_address == "127.0.0.1:8000"
        assert self.serve(host="::1", port=0).http_address == "[::1]:0"
        with pytest.raises(ConfigError, match="would be plaintext beyond this machine"):
            self.serve(host="0.0.0.0")

    def test_the_key_is_not_shown(self) -> None:
        assert "hunter2" not in repr(self.serve(api_key="hunter2"))
        with pytest.raises(ConfigError, match=r"--api-key .not shown.: --tokens does not go together"):
            self.serve(api_key="hunter2", tokens=__file__)

    def test_flags_have_titles(self) -> None:
        assert {field.name for kind in ALL_CONFIGS for field in settings_of(kind)} <= TITLES.keys()


class TestAdapters:
    def test_as_words_with_commas_and_in_a_file(self, tmp_path: Path) -> None:
        one, other = f"a={tmp_path}", f"b={tmp_path}"
        both = f"{one},{other}"
        for words in ([one, other], [both]):
            args = parse(VerifyConfig, "--lora-modules", *words)
            assert read_config(VerifyConfig, args, {}).lora_modules == both
        by_variable = read_config(VerifyConfig, parse(VerifyConfig), {"SPECWIRE_LORA_MODULES": both})
        assert by_variable.lora_modules == both
        for text in (f"lora-modules: [{one}, {other}]", f"lora_modules: {both}"):
            assert read_config(VerifyConfig, written(tmp_path, text), {}).lora_modules == both
        mapping = written(tmp_path, f"lora-modules:\n  a: {tmp_path}\n  b: {tmp_path}")
        read = read_config(VerifyConfig, mapping, {})
        assert models.adapter_directories(read.lora_modules) == {"a": tmp_path, "b": tmp_path}

    def test_a_stack_gives_them_to_the_target(self, tmp_path: Path) -> None:
        given = f"a={tmp_path}"
        assert UpConfig(lora_modules=given).verify().lora_modules == given
        assert ServeConfig(target="embedded", lora_modules=given).verify().lora_modules == given

    @pytest.mark.parametrize(
        ("given", "others", "problem"),
        [
            ("DIR", {}, "--lora-modules DIR: is not NAME=DIR"),
            ("=DIR", {}, "--lora-modules =DIR: needs a name"),
            ("a" * 257 + "=DIR", {}, "needs a name, of at most 256"),
            ("a=DIR,a=DIR", {}, "--lora-modules a=DIR: has a name that is given twice"),
            ("embedded=DIR", {}, "--lora-modules embedded=DIR: has the name of the model itself"),
            ("a=/no/such", {}, "--lora-modules a=/no/such: no such directory"),
            (",".join(f"a{i}=DIR" for i in range(65)), {}, "--lora-modules 65: are over 64 adapters"),
            (
                "a=DIR",
                {"tensor_parallel_size": 2},
                "--lora-modules a=DIR: are served with --tensor-parallel-size 1",
            ),
            (
                "a=DIR",
                {"model": "emulated:step_ms=0"},
                "--lora-modules a=DIR: emulated:step_ms=0 has no weights",
            ),
            ('{"a": ', {}, "is neither NAME=DIR nor JSON"),
        ],
    )
    def test_what_is_refused(self, tmp_path: Path, given: str, others: dict[str, Any], problem: str) -> None:
        given, problem = (text.replace("DIR", str(tmp_path)) for text in (given, problem))
        problem = problem.replace(f"NAME={tmp_path}", "NAME=DIR")
        with pytest.raises(ConfigError, match=re.escape(problem)):
            VerifyConfig(lora_modules=given, **others)
        if "model" in others:
            others = {"target": others["model"], "draft": "none"}
        with pytest.raises(ConfigError, match=re.escape(problem)):
            UpConfig(lora_modules=given, **others)


class TestRefusals:
    def test_a_misspelt_variable_is_warned_of(self, caplog: pytest.LogCaptureFixture) -> None:
        check_environment({"SPECWIRE_NUM_DRAFT_TOKEN": "sw_secret", "SPECWIRE_QQQ": "", "PATH": "/bin"})
        assert caplog.messages == [
            "environment variable SPECWIRE_NUM_DRAFT_TOKEN is not known, and has no effect; "
            "did you mean SPECWIRE_NUM_DRAFT_TOKENS?",
            "environment variable SPECWIRE_QQQ is not known, and has no effect",
        ]

    def test_variables_of_ours_and_of_a_kubernetes_service(self, caplog: pytest.LogCaptureFixture) -> None:
        check_environment({env_name(field.name): "" for _, field in FIELDS} | {"SPECWIREX": "1"})
        check_environment(KUBERNETES)
        assert not caplog.messages

    def test_variables_of_a_kubernetes_service_are_not_ours(self) -> None:
        """Beside a Service called `specwire-listen`, or one called `specwire` for a flag `--port`."""

        @dataclasses.dataclass(frozen=True, kw_only=True)
        class Listening:
            port: int = flags.option(8000, "a port")
            service_host: str = flags.option("", "a host")

        assert read_config(Listening, parse(Listening), KUBERNETES) == Listening()
        assert read_config(Listening, parse(Listening), {"SPECWIRE_PORT": "81"}).port == 81

    @pytest.mark.parametrize(
        ("variable", "text", "problem"),
        [
            ("SPECWIRE_PAGE_SIZE", "big", "is not a whole number"),
            ("SPECWIRE_PAGE_SIZE", "1.5", "is not a whole number"),
            ("SPECWIRE_PAGE_SIZE", "", "is not a whole number"),
            ("SPECWIRE_GRACE_S", "soon", "is not a number"),
            ("SPECWIRE_PREFIX_SHARING", "perhaps", "is neither true nor false"),
        ],
    )
    def test_a_variable_that_does_not_parse(self, variable: str, text: str, problem: str) -> None:
        with pytest.raises(ConfigError, match=f"{variable}={text!r} {problem}"):
            read_config(VerifyConfig, parse(VerifyConfig), {variable: text})

    @pytest.mark.parametrize(("text", "value"), [("1", True), ("TRUE", True), ("no", False), ("0", False)])
    def test_words_for_true_and_false(self, text: str, value: bool) -> None:
        environ = {"SPECWIRE_PREFIX_SHARING": text}
        assert read_config(VerifyConfig, parse(VerifyConfig), environ).prefix_sharing is value

    def test_a_bad_value_is_named_by_where_it_came_from(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"^--page-size -1: must be at least 0$"):
            read_config(VerifyConfig, parse(VerifyConfig, "--page-size", "-1"), {})
        with pytest.raises(ConfigError, match=r"^environment variable SPECWIRE_PAGE_SIZE=-1: must be"):
            read_config(VerifyConfig, parse(VerifyConfig), {"SPECWIRE_PAGE_SIZE": "-1"})
        with pytest.raises(ConfigError, match=r"^--block-size -1: must be at least 0$"):
            read_config(VerifyConfig, parse(VerifyConfig, "--block-size", "-1"), {})
        args = written(tmp_path, "block-size: -1")
        with pytest.raises(ConfigError, match=r"flags\.yaml: block-size: -1: must be at least 0$"):
            read_config(VerifyConfig, args, {})
        args.page_size = -2
        with pytest.raises(ConfigError, match=r"^--page-size -2: "):
            read_config(VerifyConfig, args, {})

    @pytest.mark.parametrize(
        ("said", "expected"),
        [
            ("--target /a: no config.json", "MODEL /a: no config.json"),
            ("--draft /d: is not that of --target /a; give", "--draft /d: is not that of MODEL /a; give"),
            ("--draft /d: is not that of --target /ab", "--draft /d: is not that of --target /ab"),
            ("--draft /d: see --target-tokenizer /a", "--draft /d: see --target-tokenizer /a"),
            ("--seed 9: does not fit", "environment variable SPECWIRE_SEED=9: does not fit"),
        ],
    )
    def test_what_is_found_later_is_named_alike(self, said: str, expected: str) -> None:
        args = parse(ServeConfig, "/a")
        with pytest.raises(ConfigError):  # for want of the directory
            read_config(ServeConfig, args, {"SPECWIRE_SEED": "9"})
        assert str(flags.as_given(ConfigError(said), args)) == expected
        assert str(flags.as_given(ModelLoadError(said), args)) == expected

    @pytest.mark.parametrize(
        ("kind", "field", "value"),
        [
            (VerifyConfig, "dtype", "int4"),
            (VerifyConfig, "max_sequences", 1 << 40),
            (VerifyConfig, "max_message_bytes", 1 << 32),
            (VerifyConfig, "least_pass_ms", 1e12),
            (CoordinatorConfig, "max_running", 0),
            (CoordinatorConfig, "max_waiting", -1),
            (VerifyConfig, "num_threads", -1),
            (VerifyConfig, "num_kv_tokens", 15),
            (VerifyConfig, "kv_cache_memory", 1.0),
            (VerifyConfig, "max_prefill_tokens", 0),
            (VerifyConfig, "max_num_tokens", 64),
            (VerifyConfig, "grace_s", -0.1),
            (VerifyConfig, "max_message_bytes", 100),
            (VerifyConfig, "log_level", "loud"),
            (VerifyConfig, "address", "localhost"),
            (DraftConfig, "support_mass", 0.0),
            (DraftConfig, "support_mass", 1.5),
            (DraftConfig, "max_support", 0),
            (CoordinatorConfig, "num_draft_tokens", "65"),
            (CoordinatorConfig, "draft_address", "nowhere"),
            (CoordinatorConfig, "verify_address", ""),
            (CoordinatorConfig, "draft_timeout_ms", 0.0),
            (CoordinatorConfig, "idle_timeout_s", 0.0),
            (CoordinatorConfig, "connect_timeout_s", float("nan")),
            (UpConfig, "target", "/no/such/directory"),
            (UpConfig, "draft", "/no/such/directory"),
            (UpConfig, "num_kv_tokens", 0),
            (UpConfig, "start_timeout_s", 0.0),
            (ClientConfig, "server", "localhost:http"),
            (ClientConfig, "timeout_s", 0.0),
            (Link, "rtt_ms", -1.0),
            (Link, "jitter_ms", float("inf")),
            (Link, "jitter_ms", 0.1),
            (Link, "bandwidth_mbps", -0.5),
            (ProxyConfig, "listen", "7070"),
            (ProxyConfig, "to", ""),
            (HttpConfig, "cors_origin", "app.example"),
            (HttpConfig, "cors_origin", "https://app.example/"),
            (HttpConfig, "cors_origin", "ftp://app.example"),
            (HttpConfig, "metrics_from", "9464"),
        ],
    )
    def test_values_out_of_range(self, kind: type[Any], field: str, value: Any) -> None:
        with pytest.raises(ConfigError, match=f"^{flag_name(field)} {value}: "):
            kind(**{field: value})


class TestModels:
    def test_the_embedded_draft_fits_the_embedded_target_alone(self) -> None:
        with pytest.raises(ConfigError, match="--draft embedded: does not fit --target org/model"):
            UpConfig(target="org/model")
        UpConfig(target="org/model", draft="none")
        UpConfig(target="org/model", draft="org/small")

    def test_a_directory_or_a_hub_id(self, tmp_path: Path) -> None:
        UpConfig(target=str(tmp_path), draft="gpt2")
        (tmp_path / "file").touch()
        for source in (str(tmp_path / "file"), str(tmp_path / "none"), "a/b/c", "~/model", "../none", ""):
            with pytest.raises(ConfigError, match="no such model directory"):
                UpConfig(target=source, draft="none")


class TestAddresses:
    @pytest.mark.parametrize("address", ["", ":1", "host", "host:", "host:65536", "host:-1", "host:²"])
    def test_refused(self, address: str) -> None:
        with pytest.raises(ConfigError, match=f"^--server {address}: is not HOST:PORT$"):
            split_address("server", address)

    def test_one_that_is_named_twice(self) -> None:
        with pytest.raises(ConfigError, match=r"^--server a:1: is named twice$"):
            ClientConfig(server="a:1,a:1")


class TestSpeculativeConfig:
    def test_keys_of_vllm(self) -> None:
        given: dict[str, Any] = {
            "method": "ngram",
            "num_speculative_tokens": 5,
            "prompt_lookup_min": 3,
            "prompt_lookup_max": 6,
        }
        config = CoordinatorConfig(speculative_config=json.dumps(given))
        assert config.text_draft == SpeculativeConfig(**given)
        assert CoordinatorConfig().text_draft is None

    @pytest.mark.parametrize(
        ("given", "named"),
        [
            ('{"method": "eagle"}', "method='eagle': is not one of ngram"),
            ('{"method": ["ngram"]}', "method=['ngram']: is not one of ngram"),
            (
                '{"method": "eagle2", "model": "org/head", "num_speculative_tokens": 3}',
                f"method='eagle2': is not one of {', '.join(METHODS)}, draft_model, heads, medusa, layers, "
                "mtp, dflash, eagle3",
            ),
            ('{"method": "bigram", "prompt_lookup_max": 4}', "is not a key of method bigram; known"),
            ('{"corpus": "README.md"}', "corpus='README.md': is not a key of method ngram"),
            ('{"method": "unigram", "corpus": "no/such"}', "corpus='no/such': no such file"),
            ('{"method": "unigram", "corpus": 3}', "corpus=3: is not the name of a file"),
            ('{"prompt_lookup_mix": 2}', "prompt_lookup_mix=2: is not a key"),
            ('{"num_speculative_tokens": true}', "num_speculative_tokens=True"),
            ('{"num_speculative_tokens": 65}', "=65: must be a whole number in [1, 64]"),
            ('{"prompt_lookup_min": "2"}', "prompt_lookup_min='2'"),
            ('{"prompt_lookup_min": 17}', "prompt_lookup_max=16: must be a whole number in [17, 32]"),
            ('["ngram"]', "is not a JSON object"),
            ("[" * 5000, "is not a JSON object"),
            ('{"method": "ngram", "method": "suffix"}', "method: is given twice"),
            ("ngram", "is not a JSON object"),
        ],
    )
    @pytest.mark.parametrize("kind", [CoordinatorConfig, UpConfig])
    def test_what_is_unknown_is_refused_by_name(self, kind: type[Any], given: str, named: str) -> None:
        with pytest.raises(ConfigError, match=re.escape(named)) as raised:
            kind(speculative_config=given)
        assert str(raised.value).startswith("--speculative-config ")

    @pytest.mark.parametrize(
        ("draft", "model", "drafts_from_text"),
        [("ngram", "none", True), ("suffix,embedded", "embedded", True), ("none", "none", False)],
    )
    def test_the_short_form(self, draft: str, model: str, drafts_from_text: bool) -> None:
        config = UpConfig(draft=draft)
        assert config.named.model == model
        implied = CoordinatorConfig(speculative_config=config.coordinator_speculation).text_draft
        assert implied == (SpeculativeConfig(method=draft.partition(",")[0]) if drafts_from_text else None)

    def test_how_the_model_drafts(self) -> None:
        given = '{"method": "draft_model", "num_speculative_tokens": 32, "max_depth": 6}'
        config = CoordinatorConfig(speculative_config=given)
        assert (config.fixed_draft_tokens, config.fixed_max_depth, config.text_draft) == (32, 6, None)
        assert not config.model_draft.use_heterogeneous_vocab
        open_ended = CoordinatorConfig(speculative_config='{"method": "draft_model"}')
        assert (open_ended.fixed_draft_tokens, open_ended.fixed_max_depth) == (None, None)

    def test_a_draft_with_another_vocabulary(self) -> None:
        """`up` tells the draft service the target's tokenizer, and the embedded draft fits any target."""
        given = '{"method": "draft_model", "use_heterogeneous_vocab": true}'
        assert CoordinatorConfig(speculative_config=given).model_draft.use_heterogeneous_vocab
        assert UpConfig(target="org/model", speculative_config=given).target_tokenizer == "org/model"
        assert UpConfig(draft="none").target_tokenizer == ""
        with pytest.raises(ConfigError, match="use_heterogeneous_vocab='yes': must be true or false"):
            UpConfig(speculative_config=given.replace("true", '"yes"'))

    def test_several_chains(self) -> None:
        given = {"method": "draft_model", "selection": "kseq", "num_chains": 8, "num_speculative_tokens": 4}
        config = CoordinatorConfig(speculative_config=json.dumps(given), rule="kseq")
        assert (config.model_draft.selection, config.model_draft.num_chains) == ("kseq", 8)
        assert config.fixed_draft_tokens == 4
        plain = CoordinatorConfig(speculative_config='{"method": "ngram"}')
        assert (plain.model_draft.selection, plain.model_draft.num_chains) == ("", 4)
        for others, problem in (
            ({"num_chains": 17}, r"num_chains=17: must be a whole number in \[1, 16\]"),
            ({"selection": "lists"}, "selection='lists': is not kseq"),
            ({"selection": ""}, "num_chains=8: is of selection kseq only"),
            ({"max_depth": 6}, "selection='kseq': does not combine with max_depth"),
            ({"use_heterogeneous_vocab": True}, "does not combine with use_heterogeneous_vocab"),
            ({"method": "medusa"}, "selection='kseq': is of method draft_model only"),
            ({"method": "ngram"}, "selection='kseq': is not a key of method ngram"),
        ):
            with pytest.raises(ConfigError, match=problem):
                CoordinatorConfig(speculative_config=json.dumps(given | others))
        with pytest.raises(ConfigError, match="--rule block: contradicts selection kseq"):
            UpConfig(speculative_config=json.dumps(given), rule="block")

    @pytest.mark.parametrize(
        ("fields", "problem"),
        [
            ({"num_draft_tokens": "4"}, "--num-draft-tokens 4: is 32 in --speculative-config"),
            ({"max_depth": "0"}, "--max-depth 0: is 6 in --speculative-config"),
            ({"draft": "ngram"}, "--draft ngram: names another method"),
        ],
        ids=str,
    )
    def test_what_is_said_twice_is_refused(self, fields: dict[str, Any], problem: str) -> None:
        given = '{"method": "draft_model", "num_speculative_tokens": 32, "max_depth": 6}'
        with pytest.raises(ConfigError, match=problem):
            UpConfig(speculative_config=given, **fields)

    def test_the_short_form_beside_the_long_one(self) -> None:
        config = UpConfig(draft="ngram", speculative_config='{"prompt_lookup_max": 7}')
        assert config.coordinator_speculation == '{"prompt_lookup_max": 7}'

    @pytest.mark.parametrize("draft", ["ngram,", "ngram,no/such/dir/", "ngram,ngram,x"])
    def test_a_model_that_is_not_there(self, draft: str) -> None:
        with pytest.raises(ConfigError, match=r"--draft .*no such model directory"):
            UpConfig(draft=draft)


def test_services_listen_where_their_clients_look_for_them() -> None:
    assert config.CoordinatorCommand().address == ClientConfig().server == UpConfig().address
    assert config.VerifyCommand().address == CoordinatorConfig().verify_address
    assert config.DraftCommand().address == ProxyConfig().to
