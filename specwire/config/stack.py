"""Configuration of the services of one machine: `specwire up`, `demo` and `timeline --live`."""

from __future__ import annotations

import json
import re
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

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
from specwire.config.flags import Config, flag_name, known_variables, option, read_config, same, settings_of
from specwire.config.models import (
    EMBEDDED,
    EMULATED,
    NO_DRAFT,
    check_inner,
    check_model,
    check_own,
)
from specwire.config.own_methods import DIR, DRAFT_MODEL, OWN, OWN_HELP, OWN_METHODS, Own, named_own
from specwire.config.parts import ListenConfig, ReportConfig, SpeculationConfig, TargetConfig
from specwire.config.services import CoordinatorConfig, DraftConfig, VerifyConfig
from specwire.config.speculative import ABOVE, INNER_METHODS, METHODS
from specwire.core import Rule

DRAFT_HELP = (
    f"directory or hub id of the draft model; {', '.join(METHODS)} draft from text without one, METHOD,DIR "
    f"from both; INNER{ABOVE}DIR has {', '.join(INNER_METHODS)} or a smaller model guess the draft's tokens; "
    f"{OWN_HELP}; none decodes plainly"
)
IN_TARGET, IN_SERVICE = "target", "service"
UP_METRICS_HELP = "HOST:PORT of the coordinator's /metrics; draft, verify and the front take the next ports"
_LOCAL = "127.0.0.1:0"
_NOTHING: Mapping[str, str] = MappingProxyType({})


class NamedDrafts(NamedTuple):
    """What `draft` names, and `speculative_config` for the target.

    Attributes:
        text: a method of drafting from text; empty for none.
        own: what the target drafts with by itself, without a draft model.
        inner: what guesses the tokens of the model; empty for nothing.
        model: the draft model, or `none`.
    """

    text: str
    own: Own
    inner: str
    model: str


@dataclass(frozen=True, kw_only=True)
class StackConfig(TargetConfig, SpeculationConfig, ReportConfig):
    """The three services on this machine. `http_flags` set `http_address`: one, or that of its host and its
    port."""

    http_flags: ClassVar[tuple[str, ...]] = ("http_address",)
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
        implied, _, inner, model = self.named
        agrees = not implied or self.speculation is None or self.speculation.method == implied
        self._check(agrees, "draft", "names another method than --speculative-config")
        self._check_own()
        if ABOVE in self.draft:
            check_inner("draft", inner, model, 1)
            problem = 'does not combine with "use_heterogeneous_vocab"'
            self._check(not self.target_tokenizer, "draft", problem)
        if model != NO_DRAFT:
            check_model("draft", model, (NO_DRAFT, *METHODS, *OWN))
            fits = model != EMBEDDED or self.target == EMBEDDED or self.target_tokenizer != ""
            self._check(fits, "draft", f"does not fit --target {self.target}; name a draft, or none")
        if self.draft_learn:
            name, problem = "draft_learn", "does not go together with another vocabulary"
            self._check(model != NO_DRAFT, name, f"--draft {self.draft} is no model")
            self._check(not model.startswith(EMULATED), name, "it has no weights")
            self._check(not self.target_tokenizer, name, problem)
        if self.draft_placement == IN_TARGET and (needs := self._needs_service):
            name, value, why = needs
            check(False, name, value, f"{why}: --draft-placement {IN_TARGET} does not go together with it")
        placed = self.replicas == 1 or self.tensor_parallel_size == 1 or self.ray_address != ""
        self._check(placed, "replicas", "need --ray-address where each spans several devices")
        if self.metrics_address:
            _, port = split_address("metrics_address", self.metrics_address)
            num_ports = len(self.metrics_addresses)
            problem = f"leaves no room for {num_ports - 1} more ports"
            self._check(port + num_ports <= 65536, "metrics_address", problem)
        self.verify()
        self.draft_service()

    @property
    def _needs_service(self) -> tuple[str, object, str] | None:
        """What the draft model cannot do in the target's process: flag, value and why; None for nothing."""
        draft, model, selection = self.draft, self.named.model, self.model_draft.selection
        device, draft_device = (
            "cuda:0" if each == "cuda" else each for each in (self.device, self.draft_device)
        )
        asked = (
            (model == NO_DRAFT, "draft", "is no draft model"),
            ("," in draft or ABOVE in draft, "draft", "has two drafters"),
            (model.startswith(EMULATED), "draft", "is emulated"),
            (self.target.startswith(EMULATED), "target", "is emulated"),
            (_has_encoder(self.target), "target", "is an encoder-decoder"),
            (device != draft_device, "draft_device", f"is not the target's, {self.device}"),
            (self.tensor_parallel_size > 1, "tensor_parallel_size", "is over 1"),
            (self.draft_learn, "draft_learn", "learns beside the target"),
            (self.draft_rtt_ms > 0, "draft_rtt_ms", "is of a network"),
            (self.draft_num_threads != 1, "draft_num_threads", "has its own threads"),
            (self.num_outcomes not in (AUTO, "0"), "num_outcomes", "works ahead"),
            (selection != "", "speculative_config", "draws several chains"),
            (self.target_tokenizer != "", "speculative_config", "has to translate"),
        )
        key = f"selection={selection!r}" if selection else "use_heterogeneous_vocab"
        for holds, name, why in asked:
            if holds:
                return name, key if name == "speculative_config" else getattr(self, name), why
        return None

    @property
    def draft_in_target(self) -> bool:
        """Whether the draft model runs in the target's process."""
        if self.draft_placement == AUTO:
            return self._needs_service is None
        return self.draft_placement == IN_TARGET

    def _check_own(self) -> None:
        """Refuse what does not go together with a target that drafts for itself."""
        draft, own, given = self.draft, self.named.own, self.own_draft
        if lacking := OWN_METHODS.get(OWN.get(draft, "")):
            self._check(not lacking.argument, "draft", f"needs more: {OWN[draft]}:{lacking.argument}")
        for other in (*draft.partition(",")[2].split(ABOVE), *draft.split(ABOVE)[1:]):
            is_own = other in OWN or named_own(other).source != ""
            self._check(not is_own, "draft", f"{other} is no draft model")
        if not own.source:
            return
        is_named = named_own(draft).source != ""
        agrees = given.source == own.source if given else not self.speculative_config
        self._check(agrees, "draft", "names another method than --speculative-config")
        alone = draft in (EMBEDDED, NO_DRAFT) or (is_named and not (given and given.model))
        self._check(alone, "draft", f"is a second draft beside the {own.source} of --speculative-config")
        name = "draft" if is_named else "speculative_config"
        takes = OWN_METHODS[own.source].argument
        is_there = takes != DIR or Path(own.argument or "-").is_dir()
        self._check(is_there, name, f"no directory of {own.source}")
        self._check(not takes or own.argument != "", name, f"needs more: {own.source}:{takes}")
        check_own(name, getattr(self, name), own, self.target, self.tensor_parallel_size)

    @property
    def requires_tokens(self) -> bool:
        """Whether clients must send a bearer token."""
        return False

    def verify(self, index: int = 0, environ: Mapping[str, str] = _NOTHING, **told: Any) -> VerifyConfig:
        """Of a replica of the verify service; `environ` and `told` as of `_part`, and so below."""
        source, argument = self.own
        # A second thread made a pass of the embedded target, whose matrices are small, 9 to 17 % slower.
        num_threads = self.num_threads or (1 if self.target == EMBEDDED else 0)
        told |= {source: argument or True} if source else {}
        told |= {"model": self.target, "device": self.device_of(index), "num_threads": num_threads}
        told |= {"replicas": 1, "metrics_address": self.metrics_addresses[2 + index]}
        return self._part(VerifyConfig, environ, told, without=ListenConfig, aliases={"model": "target"})

    def draft_service(self, environ: Mapping[str, str] = _NOTHING, **told: Any) -> DraftConfig | None:
        """None where nothing needs one."""
        if self.named.model == NO_DRAFT or self.draft_in_target:
            return None
        told |= {field.name: getattr(self, field.name) for field in fields(ReportConfig)}
        told |= {
            "model": self.named.model,
            "target_tokenizer": self.target_tokenizer,
            "inner": self.named.inner,
            "num_kv_tokens": self.num_kv_tokens,
            "prefix_sharing": self.prefix_sharing,
            "metrics_address": self.metrics_addresses[1],
        }
        return self._part(DraftConfig, environ, told, prefix="draft_", aliases={"model": "draft"})

    def coordinator(self, environ: Mapping[str, str] = _NOTHING, **told: Any) -> CoordinatorConfig:
        """Of the coordinator, but for the addresses of the others, which are not known before they serve."""
        told |= {"verify_address": _LOCAL, "draft_address": ""}
        told |= {"speculative_config": self.coordinator_speculation}
        return self._part(CoordinatorConfig, environ, told)

    def front(self, environ: Mapping[str, str] = _NOTHING) -> HttpConfig:
        """Of the HTTP front; the port of its server may be the coordinator's choice."""
        first, *_, last = self.metrics_addresses
        told = {"server": self.address, "address": self.http_address}
        return self._part(HttpConfig, environ, told | {"metrics_address": last, "metrics_from": first})

    def _part(
        self,
        kind: type[Config],
        environ: Mapping[str, str],
        told: dict[str, Any],
        *,
        prefix: str = "",
        without: type[Any] | None = None,
        aliases: Mapping[str, str] = _NOTHING,
    ) -> Config:
        """The config of a service: what it is told, then fields that this one has under the same names, then
        variables that set neither these nor a flag of `up`, where `SPECWIRE_ADDRESS` is the coordinator's.

        Args:
            prefix: of the names here.
            without: a config whose fields are not taken from here.
            aliases: of fields, for errors.
        """
        ours = {field.name for field in fields(self)}
        others = {field.name for field in fields(without)} if without else set()
        names = {field.name for field in settings_of(kind)} - others
        values = {name: getattr(self, prefix + name) for name in names if prefix + name in ours}
        known = known_variables([UpConfig, type(self)])
        left = {name: value for name, value in environ.items() if name not in known}
        given = {name: flag_name(alias) for name, alias in aliases.items()}
        return read_config(kind, Namespace(**values | told, given=given), left)

    @property
    def metrics_addresses(self) -> list[str]:
        """On consecutive ports: the coordinator's, the draft's, those of verify, the front's; all empty, or
        all with port 0, where `metrics_address` is."""
        num_ports = 2 + self.replicas + bool(self.http_address)
        return [next_address("metrics_address", self.metrics_address, n) for n in range(num_ports)]

    @cached_property
    def named(self) -> NamedDrafts:
        """What drafts."""
        first, comma, rest = self.draft.partition(",")
        text = first if first in METHODS else ""
        own, given = named_own(self.draft), self.own_draft
        if not own.source and given:
            own = Own(given.source, given.model)
        if own.source or (text and not comma):
            return NamedDrafts(text, own, "", NO_DRAFT)
        inner, _, model = (rest if text else self.draft).rpartition(ABOVE)
        return NamedDrafts(text, own, inner, model)

    @property
    def own(self) -> Own:
        """What the target drafts with by itself, a draft model in its process included."""
        return Own(DRAFT_MODEL, self.named.model) if self.draft_in_target else self.named.own

    @property
    def target_tokenizer(self) -> str:
        """`target_tokenizer` of the draft service."""
        return self.target if self.model_draft.use_heterogeneous_vocab else ""

    @property
    def coordinator_speculation(self) -> str:
        """`speculative_config` of the coordinator, which `draft` may imply."""
        text, (source, _), *_ = self.named
        if source:
            given = json.loads(self.speculative_config or "{}")
            return json.dumps({"method": source} | {name: given[name] for name in given if name != "model"})
        return self.speculative_config or (json.dumps({"method": text}) if text else "")


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

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.http_address:
            name, allowed = self.http_flags[0], self.allow_plaintext
            check_plaintext(name, self.http_address, allowed=allowed, remedy=FRONT_TLS)
            problem = "speaks plaintext to the coordinator; with --tls-cert, start `specwire http` by itself"
            self._check(not self.tls_cert, "http_address", problem)

    @property
    def requires_tokens(self) -> bool:
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
class DemoConfig(StackConfig):
    """`specwire demo`: a target as slow as a large one, and the rule whose text is fixed by the seed."""

    address: str = same(StackConfig, "address", "127.0.0.1:0")
    log_level: str = same(StackConfig, "log_level", "warning")
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
        is_valid = all(re.fullmatch(r"\s*[0-9]{1,5}\s*", word) and 0 < int(word) <= 1 << 16 for word in words)
        self._check(is_valid, "streams", "must be numbers in [1, 65536], by commas")

    @property
    def num_streams(self) -> list[int]:
        """In increasing order."""
        return sorted({int(word) for word in self.streams.split(",")})
