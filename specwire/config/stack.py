"""Configuration of the services of one machine: `specwire up`, `demo` and `timeline --live`."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from specwire.config.client import HttpConfig
from specwire.config.fields import (
    AUTO,
    FRONT_TLS,
    at_least,
    check,
    check_address,
    check_amount,
    check_duration,
    check_plaintext,
    next_address,
    one_of,
    split_address,
)
from specwire.config.flags import option, same, settings_of
from specwire.config.models import (
    EMBEDDED,
    EMULATED,
    NO_DRAFT,
    check_group,
    check_inner,
    check_model,
    check_own,
)
from specwire.config.own_methods import DIR, DRAFT_MODEL, OWN, OWN_HELP, OWN_METHODS, Own, named_own
from specwire.config.parts import ListenConfig, ReportConfig, SpeculationConfig, TargetConfig
from specwire.config.services import CoordinatorConfig, DraftConfig, VerifyConfig
from specwire.config.speculative import (
    ABOVE,
    INNER_METHODS,
    METHODS,
    model_draft,
    own_draft,
    parse_method,
    split_hierarchy,
)
from specwire.core import Rule

DRAFT_HELP = (
    f"directory or hub id of the draft model; {', '.join(METHODS)} draft from text without one, METHOD,DIR "
    f"from both; INNER{ABOVE}DIR has {', '.join(INNER_METHODS)} or a smaller model guess the draft's tokens; "
    f"{OWN_HELP}; none decodes plainly"
)
IN_TARGET, IN_SERVICE = "target", "service"
METRICS_ROLES = ("coordinator", "draft", "verify")
"""Services in the order of their ports."""
UP_METRICS_HELP = "HOST:PORT of the coordinator's /metrics; draft, verify and the front take the next ports"


@dataclass(frozen=True, kw_only=True)
class StackConfig(TargetConfig, SpeculationConfig, ReportConfig):
    """The three services on this machine."""

    target: str = option(EMBEDDED, "directory or hub id of the target model", check=check_model)
    draft: str = option(EMBEDDED, DRAFT_HELP)
    draft_device: str = same(DraftConfig, "device", doc="device of the draft: cpu, cuda or cuda:N")
    draft_placement: str = option(
        AUTO,
        "where the draft model runs: target, in the target's process, or service, in one of its own; auto is "
        "target where both have one device, and nothing is asked for that a service alone has",
        check=one_of(AUTO, IN_TARGET, IN_SERVICE),
    )
    draft_num_threads: int = same(
        DraftConfig, "num_threads", 1, doc="CPU threads for the draft; 0: as many as are free"
    )
    draft_learn: bool = same(DraftConfig, "learn")
    draft_learn_share: float = same(DraftConfig, "learn_share")
    draft_rtt_ms: float = option(
        0.0, "round trip to emulate between coordinator and draft, in milliseconds", check=check_amount
    )
    address: str = option(
        "127.0.0.1:7070", "HOST:PORT the coordinator listens on; port 0 picks a free one", check=split_address
    )
    http_address: str = option(
        "", "HOST:PORT for OpenAI's API and the page; empty serves neither", check=check_address
    )
    start_timeout_s: float = option(
        300.0, "longest wait for the services to be ready, in seconds", check=check_duration
    )
    metrics_address: str = same(ReportConfig, "metrics_address", doc=UP_METRICS_HELP)

    def __post_init__(self) -> None:
        """Refuse here what a service would only refuse seconds later, and under another flag's name."""
        super().__post_init__()
        implied = self.draft.partition(",")[0]
        agrees = implied not in METHODS or parse_method(self.speculative_config) in ("", implied)
        check(agrees, "draft", self.draft, "names another method than --speculative-config")
        self._check_own()
        if ABOVE in self.draft:
            check_inner("draft", self.inner, self.draft_model, 1)
            problem = 'does not combine with "use_heterogeneous_vocab"'
            check(not self.target_tokenizer, "draft", self.draft, problem)
        if self.draft_model != NO_DRAFT:
            check_model("draft", self.draft_model, (NO_DRAFT, *METHODS, *OWN))
            fits = self.draft_model != EMBEDDED or self.target == EMBEDDED or self.target_tokenizer
            problem = f"does not fit --target {self.target}; name a draft, or none"
            check(bool(fits), "draft", self.draft, problem)
        self._check_learn()
        self._check_placement()
        check_group(self.tensor_parallel_size, self.ray_address, self.target, self.device)
        placed = self.replicas == 1 or self.tensor_parallel_size == 1 or self.ray_address != ""
        check(placed, "replicas", self.replicas, "need --ray-address where each spans several devices")
        if self.metrics_address:
            _, port = split_address("metrics_address", self.metrics_address)
            room = port + self.num_metrics_ports <= 65536
            problem = f"leaves no room for {self.num_metrics_ports - 1} more ports"
            check(room, "metrics_address", self.metrics_address, problem)

    @property
    def _needs_service(self) -> tuple[str, object, str] | None:
        """What the draft model cannot do in the target's process: flag, value and why; None for nothing."""
        draft, selection = self.draft, model_draft(self.speculative_config).selection
        asked: tuple[tuple[bool, str, object, str], ...] = (
            (self.draft_model == NO_DRAFT, "draft", draft, "is no draft model"),
            ("," in draft or ABOVE in draft, "draft", draft, "has two drafters"),
            (self.draft_model.startswith(EMULATED), "draft", draft, "is emulated"),
            (self.target.startswith(EMULATED), "target", self.target, "is emulated"),
            (_has_encoder(self.target), "target", self.target, "is an encoder-decoder"),
            (self._is_apart, "draft_device", self.draft_device, f"is not the target's, {self.device}"),
            (self.tensor_parallel_size > 1, "tensor_parallel_size", self.tensor_parallel_size, "is over 1"),
            (self.draft_learn, "draft_learn", True, "learns beside the target"),
            (self.draft_rtt_ms > 0, "draft_rtt_ms", self.draft_rtt_ms, "is of a network"),
            (self.draft_num_threads != 1, "draft_num_threads", self.draft_num_threads, "has its own threads"),
            (self.num_outcomes not in (AUTO, "0"), "num_outcomes", self.num_outcomes, "works ahead"),
            (selection != "", "speculative_config", f"selection={selection!r}", "draws several chains"),
            (
                self.target_tokenizer != "",
                "speculative_config",
                "use_heterogeneous_vocab",
                "has to translate",
            ),
        )
        return next(((name, value, why) for holds, name, value, why in asked if holds), None)

    @property
    def _is_apart(self) -> bool:
        """Whether draft and target have different devices."""
        first = {"cuda": "cuda:0"}
        devices = self.device, self.draft_device
        return devices[0] != devices[1] and len({first.get(each, each) for each in devices}) > 1

    @property
    def draft_in_target(self) -> bool:
        """Whether the draft model runs in the target's process."""
        if self.draft_placement == AUTO:
            return self._needs_service is None
        return self.draft_placement == IN_TARGET

    def _check_placement(self) -> None:
        needs = self._needs_service
        if self.draft_placement == IN_TARGET and needs is not None:
            name, value, why = needs
            check(False, name, value, f"{why}: --draft-placement {IN_TARGET} does not go together with it")

    def _check_learn(self) -> None:
        if not self.draft_learn:
            return
        check(self.draft_model != NO_DRAFT, "draft_learn", True, f"--draft {self.draft} is no model")
        check(not self.draft_model.startswith(EMULATED), "draft_learn", True, "it has no weights")
        check(not self.target_tokenizer, "draft_learn", True, "does not go together with another vocabulary")

    def _check_own(self) -> None:
        """Refuse what does not go together with a target that drafts for itself."""
        draft, own, given = self.draft, self._named_own, own_draft(self.speculative_config)
        lacking = OWN_METHODS.get(OWN.get(draft, ""))
        takes = lacking.argument if lacking else ""
        check(not takes, "draft", draft, f"needs more: {OWN.get(draft)}:{takes}")
        others = [*draft.partition(",")[2].split(ABOVE), *draft.split(ABOVE)[1:]]
        for other in others:
            is_own = other in OWN or named_own(other).source != ""
            check(not is_own, "draft", draft, f"{other} is no draft model")
        if not own.source:
            return
        is_named = named_own(draft).source != ""
        agrees = given.source == own.source if given else not self.speculative_config
        check(agrees, "draft", draft, "names another method than --speculative-config")
        alone = draft in (EMBEDDED, NO_DRAFT) or (is_named and not (given and given.model))
        check(alone, "draft", draft, f"is a second draft beside the {own.source} of --speculative-config")
        name = "draft" if is_named else "speculative_config"
        value = getattr(self, name)
        takes = OWN_METHODS[own.source].argument
        is_there = takes != DIR or Path(own.argument or "-").is_dir()
        check(is_there, name, value, f"no directory of {own.source}")
        check(not takes or own.argument != "", name, value, f"needs more: {own.source}:{takes}")
        check_own(name, value, own, self.target, self.tensor_parallel_size)

    @property
    def http_flags(self) -> tuple[str, ...]:
        """The names of the flags that set `http_address`: one, or that of its host and that of its port."""
        return ("http_address",)

    @property
    def requires_tokens(self) -> bool:
        """Whether clients must send a bearer token."""
        return False

    def verify_settings(self, index: int = 0) -> dict[str, Any]:
        """What a replica of the verify service is told besides its model, as fields of `VerifyConfig`."""
        source, argument = self.own
        # A second thread made a pass of the embedded target, whose matrices are small, 9 to 17 % slower.
        num_threads = self.num_threads or (1 if self.target == EMBEDDED else 0)
        return self._shared(VerifyConfig, ListenConfig) | {
            "device": self.device_of(index),
            "num_threads": num_threads,
            "replicas": 1,
            "metrics_address": self.metrics_address_of("verify"),
            **({source: argument or True} if source else {}),
        }

    @property
    def draft_settings(self) -> dict[str, Any]:
        """What the draft service is told besides its model, as fields of `DraftConfig`."""
        return (
            self._shared(ReportConfig)
            | self._shared(DraftConfig, prefix="draft_")
            | {
                "target_tokenizer": self.target_tokenizer,
                "inner": self.inner,
                "num_kv_tokens": self.num_kv_tokens,
                "prefix_sharing": self.prefix_sharing,
                "metrics_address": self.metrics_address_of("draft"),
            }
        )

    @property
    def coordinator_settings(self) -> dict[str, Any]:
        """What the coordinator is told besides the addresses of the others, as fields of its config."""
        return self._shared(CoordinatorConfig) | {"speculative_config": self.coordinator_speculation}

    @property
    def front_settings(self) -> dict[str, Any]:
        """What the HTTP front is told besides the coordinator's address, as fields of `HttpConfig`."""
        metrics = self.metrics_address
        own = next_address("metrics_address", metrics, self.num_metrics_ports - 1)
        return self._shared(HttpConfig) | {
            "address": self.http_address,
            "metrics_address": own,
            "metrics_from": metrics,
        }

    @property
    def num_metrics_ports(self) -> int:
        """From that of `metrics_address` on: the coordinator's, the draft's, those of verify, the front's."""
        return 2 + self.replicas + bool(self.http_address)

    def _shared(
        self, kind: type[Any], without: type[Any] | None = None, *, prefix: str = ""
    ) -> dict[str, Any]:
        """The values of those fields of a service's config that this one has under the same names.

        Args:
            without: a config whose fields are not among them.
            prefix: of the names here.
        """
        ours = {field.name for field in fields(self)}
        others = {field.name for field in fields(without)} if without else set()
        names = [field.name for field in settings_of(kind) if field.name not in others]
        return {name: getattr(self, prefix + name) for name in names if prefix + name in ours}

    def metrics_address_of(self, role: str) -> str:
        """Metrics address of one of the services, on consecutive ports; port 0 stays 0."""
        return next_address("metrics_address", self.metrics_address, METRICS_ROLES.index(role))

    @property
    def own(self) -> Own:
        """What the target drafts with by itself, a draft model in its process included."""
        return Own(DRAFT_MODEL, self.draft_model) if self.draft_in_target else self._named_own

    @property
    def _named_own(self) -> Own:
        """What the target drafts with by itself, without a draft model."""
        named, given = named_own(self.draft), own_draft(self.speculative_config)
        return named if named.source or not given else Own(given.source, given.model)

    @property
    def draft_model(self) -> str:
        """The draft model that `draft` names, or `none`."""
        if self._named_own.source:
            return NO_DRAFT
        return split_hierarchy(self._service_draft)[1]

    @property
    def inner(self) -> str:
        """`inner` of the draft service."""
        return "" if self._named_own.source else split_hierarchy(self._service_draft)[0]

    @property
    def _service_draft(self) -> str:
        """What `draft` names besides a method of drafting from text."""
        first, comma, rest = self.draft.partition(",")
        if first not in METHODS:
            return self.draft
        return rest if comma else NO_DRAFT

    @property
    def target_tokenizer(self) -> str:
        """`target_tokenizer` of the draft service."""
        return self.target if model_draft(self.speculative_config).use_heterogeneous_vocab else ""

    @property
    def coordinator_speculation(self) -> str:
        """`speculative_config` of the coordinator, which `draft` may imply."""
        source, method = self._named_own.source, self.draft.partition(",")[0]
        if source:
            given = json.loads(self.speculative_config or "{}")
            return json.dumps({"method": source} | {name: given[name] for name in given if name != "model"})
        implied = json.dumps({"method": method}) if method in METHODS else ""
        return self.speculative_config or implied


def _has_encoder(source: str) -> bool:
    """Whether a model's directory says so. Of a hub id, the preflight and the service find out."""
    try:
        found = json.loads((Path(source) / "config.json").read_text())
    except (OSError, ValueError):  # the preflight says what is wrong with it
        return False
    return isinstance(found, dict) and bool(found.get("is_encoder_decoder"))


@dataclass(frozen=True, kw_only=True)
class UpConfig(StackConfig, ListenConfig):
    """`specwire up`: TLS and tokens are the coordinator's. The model services listen on loopback, and with
    `tokens` require one that is made at start."""

    address: str = same(StackConfig, "address")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.http_address:
            name, allowed = self.http_flags[0], self.allow_plaintext
            check_plaintext(name, self.http_address, allowed=allowed, remedy=FRONT_TLS)
            problem = "speaks plaintext to the coordinator; with --tls-cert, start `specwire http` by itself"
            check(not self.tls_cert, "http_address", self.http_address, problem)

    @property
    def requires_tokens(self) -> bool:
        """See `StackConfig`."""
        return self.tokens != ""


@dataclass(frozen=True, kw_only=True)
class LiveConfig(StackConfig):
    """`specwire timeline --live`: a free port, and a draft service, whose work is to be seen beside the
    target's; the run is too short to choose a draft length."""

    address: str = same(StackConfig, "address", "127.0.0.1:0")
    draft_placement: str = same(StackConfig, "draft_placement", IN_SERVICE)
    num_draft_tokens: str = same(StackConfig, "num_draft_tokens", "4")
    log_level: str = same(StackConfig, "log_level", "warning")


@dataclass(frozen=True, kw_only=True)
class DemoConfig(LiveConfig):
    """`specwire demo`: a target as slow as a large one, and the rule whose text is fixed by the seed."""

    draft_placement: str = same(StackConfig, "draft_placement")
    num_draft_tokens: str = same(StackConfig, "num_draft_tokens")
    least_pass_ms: float = same(StackConfig, "least_pass_ms", 30.0)
    rule: str = same(StackConfig, "rule", Rule.GUMBEL.value)


@dataclass(frozen=True, kw_only=True)
class TuneConfig(StackConfig):
    """`specwire tune`: what is measured, and for how many streams."""

    address: str = same(StackConfig, "address", "127.0.0.1:0")
    log_level: str = same(StackConfig, "log_level", "warning")
    text: str = option("", "UTF-8 file of prompts, in windows; empty takes built-in beginnings of programs")
    streams: str = option("1,4,16,64,256", "numbers of streams to say the choice for, by commas")
    measured_streams: int = option(16, "most streams that are measured; 0 measures none", check=at_least(0))
    turns: int = option(6, "requests of each stream and kind that are measured", check=at_least(2))
    picture: str = option("", "PNG or SVG file with what is expected of each way to draft")

    def __post_init__(self) -> None:
        super().__post_init__()
        words = self.streams.split(",")
        is_valid = all(word.strip().isdigit() and 0 < int(word) <= 1 << 16 for word in words)
        check(is_valid, "streams", self.streams, "must be numbers in [1, 65536], by commas")

    @property
    def num_streams(self) -> list[int]:
        """In increasing order."""
        return sorted({int(word) for word in self.streams.split(",")})
