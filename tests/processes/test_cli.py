"""The command line, in this process wherever no process is the point."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import coordinator.__main__
import draft_service.__main__
import verify_service.__main__
from specwire import Grammar, SamplingParams
from specwire.cli import kept, supervisor
from specwire.cli import main as cli
from specwire.config.flags import env_name, flag_name
from specwire.config.sampling_flags import sampling_params
from specwire.config.services import CoordinatorConfig, DraftConfig, VerifyConfig
from specwire.config.stack import UpConfig
from specwire.errors import ConfigError
from specwire.rpc.interrupts import SAID
from tests.support.command_line import check_completion, one_line_error, usage_error
from tests.support.harness import LocalStack, local_stack
from tests.support.pairs import save_target
from tests.support.parameters import BEAM_SEARCH, VALUES
from tests.support.processes import running

PROMPT = "The quick brown"
SERVE = ["serve", "--address", "127.0.0.1:0", "--port", "0"]
SERVICE_MAINS = [
    (draft_service.__main__.main, DraftConfig),
    (verify_service.__main__.main, VerifyConfig),
    (coordinator.__main__.main, CoordinatorConfig),
]


pytestmark = pytest.mark.usefixtures("restored")


class TestHelp:
    def test_lists_the_commands(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as ended:
            cli.main(["--help"])
        assert ended.value.code == 0
        text = capsys.readouterr().out
        for command in ("up", "demo", "generate", "timeline", "proxy", "draft", "verify", "coordinator"):
            assert re.search(rf"^    {command}\b", text, re.MULTILINE)
        assert "examples:" in text

    @pytest.mark.parametrize(
        "command", ["serve", "up", "demo", "generate", "chat", "timeline", "proxy", "bench serve"]
    )
    def test_of_a_command(self, command: str, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as ended:
            cli.main([*command.split(), "--help"])
        assert ended.value.code == 0
        self.check_lines(capsys.readouterr().out)

    @pytest.mark.parametrize(("main", "config"), SERVICE_MAINS)
    def test_of_a_service_names_every_flag_and_variable(
        self, main: Any, config: Any, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as ended:
            main(["--help"])
        assert ended.value.code == 0
        text = capsys.readouterr().out
        self.check_lines(text)
        for field in dataclasses.fields(config):
            assert flag_name(field.name) in text
            assert env_name(field.name) in text

    @staticmethod
    def check_lines(text: str) -> None:
        assert text.startswith("usage: specwire ")
        assert not {"==SUPPRESS==", "None", "MISSING"} & set(text.split())
        assert all(len(line) <= 100 for line in text.splitlines())

    def test_services_are_reached_through_the_command(self) -> None:
        with running("draft", "--help") as command:
            assert command.line().startswith("usage: specwire draft ")
            assert command.ended() == 0

    def test_version(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            cli.main(["--version"])
        assert re.match(r"specwire \d+\.\d+", capsys.readouterr().out)


class TestUsage:
    @pytest.mark.parametrize(
        ("argv", "part"),
        [
            ([], "COMMAND"),
            (["generat", "x"], "did you mean generate?"),
            (["bench", "serv"], "did you mean serve?"),
            (["--verison"], "--verison; did you mean --version?"),
            (
                ["--tagret", "x", "up"],
                "--tagret: flags of a command follow the command; did you mean --target?",
            ),
            (["serve", "--tagret", "x"], "--tagret; did you mean --target?"),
            (["up", "--targets", "x"], "--targets x; did you mean --target?"),
            (["up", "--addr", "127.0.0.1:0"], "--addr"),
            (["up", "prompt"], "prompt"),
            (["generate"], "prompt --token-ids"),
            (["generate", "x", "--token-ids", "1"], "not allowed with"),
            (["generate", "--token-ids", "1,x"], "'1,x' is not a comma-separated list"),
            (["generate", "x", "--logit-bias", "7"], "'7' is not TOKEN_ID=BIAS"),
            (["generate", "x", "--rule", "tree"], "'tree'"),
            (["generate", "x", "--max-tokens", "many"], "--max-tokens: invalid int value: 'many'"),
        ],
    )
    def test_wrong_flags(self, argv: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert part in usage_error(argv, capsys)

    @pytest.mark.parametrize(("main", "_"), SERVICE_MAINS)
    def test_wrong_flags_of_services(self, main: Any, _: Any, capsys: pytest.CaptureFixture[str]) -> None:
        assert "--adress x; did you mean --address?" in usage_error(["--adress", "x"], capsys, main)

    @pytest.mark.parametrize(
        ("argv", "parts"),
        [
            (["generate", "x", "--top-p", "2"], "top_p=2.0: must lie in (0, 1]"),
            (["generate", "x", "--temperature", "nan"], "temperature=nan"),
            (["generate", "x", "--server", "here"], "--server here: is not HOST:PORT"),
            (["up", "--target", "/none/such"], "--target /none/such: no such model directory"),
            (["proxy", "--jitter-ms", "3", "--rtt-ms", "4"], "--jitter-ms 3.0: is more than half the round"),
            (["demo", "--num-draft-tokens", "65"], "--num-draft-tokens 65: must lie in [0, 64]"),
            ([*SERVE, "embedded", "--port", "70000"], "error: --port 70000: must lie in [0, 65535]"),
            ([*SERVE, "embedded", "--host", "127.0.0.1:80"], "error: --host 127.0.0.1:80: is neither"),
            (
                [*SERVE, "embedded", "--allow-plaintext", "--host", "192.0.2.1"],
                "error: --host 192.0.2.1: cannot be bound (",
            ),
            (
                [*SERVE, "embedded", "--max-num-batched-tokens", "1"],
                "error: --max-num-batched-tokens 1: must",
            ),
            ([*SERVE, "/"], "error: MODEL /: no config.json in this directory"),
            (["serve"], "error: MODEL missing: give a directory or hub id of a model, or embedded\n"),
            ([*SERVE, "embeded"], "error: MODEL embeded: no such model"),
            (
                [*SERVE, "x", "--quantization", "awq"],
                "error: --quantization: is vLLM's, not ours: it is read",
            ),
            (
                [*SERVE, "--target", "x"],
                "error: --target: is specwire up's, not ours: give it without a flag",
            ),
            ([*SERVE, "x", "--config", "/none.yaml"], "error: --config /none.yaml: cannot be read"),
            ([*SERVE, "x", "--max-model-len", "-1"], "error: --max-model-len -1: must be at least 0"),
            (
                [*SERVE, "embedded", "--max-model-len", "2049"],
                "error: --max-model-len 2049: MODEL embedded has a context of 2048",
            ),
        ],
    )
    def test_values_that_cannot_be(
        self, argv: list[str], parts: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert parts in one_line_error(2, argv, capsys)

    def test_a_port_in_use_is_known_at_once(self, capsys: pytest.CaptureFixture[str]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            address = f"127.0.0.1:{taken.getsockname()[1]}"
            started = time.monotonic()
            cli.main(["serve", "embedded", "--address", "127.0.0.1:0", "--port", address.partition(":")[2]])
            assert f"error: --port {address.partition(':')[2]}: cannot be bound (" in capsys.readouterr().err
            for command in ("up", "demo"):
                cli.main([command, "--address", address, *(["--json"] if command == "demo" else [])])
                assert f"error: --address {address}: cannot be bound (" in capsys.readouterr().err
            assert time.monotonic() - started < 3.0, "before any model is loaded"

    def test_variables_without_a_flag_of_ups_reach_the_services(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SPECWIRE_PAGE_SIZE", "4")
        monkeypatch.setenv("SPECWIRE_ADDRESS", "127.0.0.1:7070")  # the coordinator's, not everyone's
        verify = UpConfig().verify(environ=os.environ)
        assert (verify.page_size, verify.address) == (4, "127.0.0.1:0")
        monkeypatch.setattr(kept, "KeptService", lambda *_, **__: pytest.fail("before anything starts"))
        with pytest.raises(ConfigError, match="SPECWIRE_MAX_WAITING='x' is not a whole number"):
            supervisor.Stack(UpConfig(address="127.0.0.1:0"), {"SPECWIRE_MAX_WAITING": "x"})

    def test_every_config_field_of_up_reaches_a_service(self) -> None:
        changed = UpConfig(
            target="org/t",
            draft="org/d",
            dtype="float16",
            device="cuda:0",
            draft_dtype="bfloat16",
            draft_device="cuda:1",
            address="127.0.0.1:81",
            num_draft_tokens="3",
            num_outcomes="7",
            draft_rtt_ms=2.5,
            least_pass_ms=12.5,
            num_kv_tokens=4096,
            num_threads=2,
            draft_num_threads=3,
            prefix_sharing=False,
            grace_s=1.5,
            log_level="error",
            tls_cert=__file__,
            tls_key=supervisor.__file__,
            tls_client_ca=os.__file__,
            tokens=dataclasses.__file__,
            allow_plaintext=True,
        )

        draft = changed.draft_service()
        assert draft is not None
        told = [dataclasses.asdict(each) for each in (changed.verify(), draft, changed.coordinator())]
        here = {"target", "draft", "draft_rtt_ms", "draft_placement", "draft_learn", "replicas"}
        here |= {"http_address", "start_timeout_s"}
        for field in dataclasses.fields(UpConfig):
            if field.name not in here:
                value, names = getattr(changed, field.name), (field.name, field.name.removeprefix("draft_"))
                assert value in [each.get(name) for each in told for name in names], field.name
        assert not any(each[name] for each in told[:2] for name in ("tokens", "tls_cert")), (
            "the coordinator's"
        )
        assert (learns := UpConfig(draft_learn=True).draft_service()) is not None
        assert learns.learn
        assert UpConfig(draft="ngram").draft_service() is None
        up = UpConfig(http_address="0.0.0.0:80", allow_plaintext=True)
        assert up.front().address == "0.0.0.0:80"


WRITTEN = {
    "logit_bias": ["3=-1.5", "300=100"],
    "stop": list(VALUES["stop"]),
    "stop_token_ids": ["4,5"],
}
"""Values of flags that are not one number or text; the first two flags are repeated."""


def sampling_flag(name: str) -> list[str]:
    """The words that give a parameter its value of `VALUES`."""
    value = VALUES[name]
    if isinstance(value, bool):
        return [flag_name(name if value else f"no_{name}")]
    texts_ = WRITTEN.get(name, [str(value)])
    return [word for text in texts_ for word in (flag_name(name), text)]


class TestSamplingFlags:
    def test_every_parameter_is_here(self) -> None:
        assert VALUES.keys() == {field.name for field in dataclasses.fields(SamplingParams)}

    @pytest.mark.parametrize(
        ("command", "name"),
        [
            (command, name)
            for name in VALUES
            for command in ("generate", "demo")
            if name != "grammar" and (command, name) != ("demo", "draft")  # there it names the model to start
        ],
    )
    def test_one_by_one(self, command: str, name: str) -> None:
        given = dict.fromkeys(["num_beams", name] if name in BEAM_SEARCH else [name])
        words = [word for each in given for word in sampling_flag(each)]
        args = cli._parser().parse_args([command, "x", *words])
        shown = SamplingParams(max_tokens=192, temperature=0.7, seed=7)
        defaults = {"demo": shown, "generate": SamplingParams()}
        expected = dataclasses.replace(defaults[command], **{each: VALUES[each] for each in given})
        assert sampling_params(args) == expected

    def test_each_kind_of_grammar(self, tmp_path: Path) -> None:
        file = tmp_path / "file"
        file.write_text("true")
        flags: list[tuple[list[str], dict[str, Any]]] = [
            (["--json-schema", str(file)], {"json_schema": "true"}),
            (["--json-object"], {"json_object": True}),
            (["--regex", "a+"], {"regex": "a+"}),
            (["--choice", "a", "--choice", "b"], {"choice": ("a", "b")}),
            (["--grammar", str(file)], {"ebnf": "true"}),
        ]
        for given, expected in flags:
            params = sampling_params(cli._parser().parse_args(["generate", "x", *given]))
            assert params == SamplingParams(grammar=Grammar(**expected))


class TestGenerate:
    FLAGS = ("--max-tokens", "20", "--seed", "3")
    PARAMS = SamplingParams(max_tokens=20, seed=3)

    def test_prints_the_text(self, stack: LocalStack, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["generate", PROMPT, "--server", stack.address, *self.FLAGS]) == 0
        out, err = capsys.readouterr()
        assert out == stack.client.generate(PROMPT, self.PARAMS).text + "\n"
        assert err == ""

    def test_the_server_comes_from_the_variable(
        self, stack: LocalStack, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("SPECWIRE_SERVER", stack.address)
        assert cli.main(["generate", PROMPT, *self.FLAGS]) == 0
        assert capsys.readouterr().out.strip() != ""
        started = time.monotonic()
        error = one_line_error(1, ["generate", PROMPT, *self.FLAGS, "--server", "127.0.0.1:1"], capsys)
        assert "nothing serves at 127.0.0.1:1" in error
        assert time.monotonic() - started < 5.0

    def test_token_ids(self, stack: LocalStack, capsys: pytest.CaptureFixture[str]) -> None:
        argv = ["generate", "--token-ids", "5,6,7", "--server", stack.address, "--json", *self.FLAGS]
        assert cli.main(argv) == 0
        got = json.loads(capsys.readouterr().out)
        check_completion(got, num_tokens=20)
        expected = stack.client.generate(prompt_token_ids=[5, 6, 7], params=self.PARAMS)
        assert got["token_ids"] == list(expected.token_ids)
        assert got["usage"]["prompt_tokens"] == 3

    def test_ids_come_out_where_there_is_no_text(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with local_stack(save_target(tmp_path / "bare")) as bare:
            argv = ["generate", "--token-ids", "5,6", "--server", bare.address, "--ignore-eos", *self.FLAGS]
            assert cli.main(argv) == 0
            assert len(capsys.readouterr().out.split()) == 20
            assert "no tokenizer" in one_line_error(
                2, ["generate", "x", "--server", bare.address, *self.FLAGS], capsys
            )

    def test_a_refusal_of_the_server(self, stack: LocalStack, capsys: pytest.CaptureFixture[str]) -> None:
        argv = ["generate", "--token-ids", "5,9999", "--server", stack.address]
        assert "prompt_token_ids[1]=9999" in one_line_error(2, argv, capsys)

    def test_the_deadline(self, stack: LocalStack, capsys: pytest.CaptureFixture[str]) -> None:
        """In the same words whoever sees it first: the client, the coordinator or a model service."""
        argv = ["generate", PROMPT, "--server", stack.address, "--timeout-s", "0.3", "--json"]
        error = one_line_error(1, [*argv, "--max-tokens", "4000", "--ignore-eos"], capsys)
        assert error == "error: the deadline passed\n"
        stack.assert_idle_within(1.0)

    @pytest.mark.parametrize(
        ("number", "status"),
        [(signal.SIGINT, 130), (signal.SIGTERM, -15), (None, 141)],
        ids=["interrupt", "end", "a reader that goes away"],
    )
    def test_an_interrupt_cancels(self, stack: LocalStack, number: int | None, status: int) -> None:
        argv = ["generate", PROMPT, "--server", stack.address, "--max-tokens", "4000", "--ignore-eos"]
        with running(*argv) as command:
            process = command.process
            assert process.stdout is not None
            assert process.stdout.read(1)
            assert stack.status("verify").num_sequences == 1
            if number is None:
                process.stdout.close()
            else:
                process.send_signal(number)
            most_s = {130: 3, -15: 10, 141: 20}[status]
            assert process.wait(most_s) == status
            assert command.errors() == ""
        stack.assert_idle_within(1.0)


def full_output(argv: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """The error of a command whose standard output is a full disk."""
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert cli.main(argv) == 1
    return capsys.readouterr().err


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("name", ["generate", "status", "drafts", "health", "bench"])
def test_a_full_output(
    stack: LocalStack,
    name: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Is one line, without a traceback; what was measured is in its file."""
    found = tmp_path / "found.json"
    words = {
        "generate": ["generate", PROMPT, "--max-tokens", "4"],
        "bench": ["bench", "serve", "--num-requests", "1", "--max-tokens", "2", "--json", str(found)],
    }
    argv = [*words.get(name, [name]), "--server", stack.address]
    error = full_output(argv, capsys, monkeypatch)
    assert error == "error: standard output: cannot be written (No space left on device)\n"
    assert found.exists() == (name == "bench")


class TestProxy:
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_stands_between_and_ends_cleanly(self, number: int) -> None:
        with socket.create_server(("127.0.0.1", 0)) as service:
            to = f"127.0.0.1:{service.getsockname()[1]}"
            argv = ["proxy", "--to", to, "--rtt-ms", "40", "--jitter-ms", "2", "--bandwidth-mbps", "8"]
            with running(*argv) as command:
                line = command.ready_line()
                adds = f" to {to}: 40 ms round trip, ±2 ms and 8 Mbit/s each way\n"
                assert line.startswith("ready 127.0.0.1:")
                assert line.endswith(adds)
                started = time.monotonic()
                port = int(line.removesuffix(adds).rpartition(":")[2])
                with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
                    service.settimeout(10)
                    served, _ = service.accept()
                    with served:
                        served.settimeout(10)
                        served.sendall(served.recv(1, socket.MSG_WAITALL) if client.send(b"x") else b"")
                        assert client.recv(1) == b"x"
                        assert time.monotonic() - started >= 0.036
                        command.process.send_signal(number)
                        with pytest.raises(ConnectionResetError):
                            client.recv(1)
                status, said, most_s = (130, f"{SAID}\n", 3) if number == signal.SIGINT else (0, "", 10)
                assert command.process.wait(most_s) == status
                assert (command.line(), command.errors()) == ("", said)
