"""Configuration of the services of one machine: `specwire up`, `demo` and `timeline --live`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from specwire.config.fields import (
    AUTO,
    FRONT_TLS,
    GRACE_HELP,
    at_least,
    chat_template_option,
    check,
    check_address,
    check_amount,
    check_duration,
    check_plaintext,
    count_or_auto,
    log_format_option,
    log_level_option,
    one_of,
    split_address,
)
from specwire.config.flags import CheckedConfig, option
from specwire.config.models import (
    DTYPES,
    EMBEDDED,
    EMULATED,
    LEARN_HELP,
    LEARN_SHARE,
    LEARN_SHARE_HELP,
    LEAST_PASS_HELP,
    MAX_DEPTH_HELP,
    NO_DRAFT,
    NUM_DRAFT_TOKENS_HELP,
    NUM_OUTCOMES_HELP,
    PLACEMENT_HELP,
    RULE_HELP,
    RULES,
    SUFFIX_SHARED_HELP,
    THREADS_HELP,
    TRACE_DETAIL_HELP,
    VERIFY_AHEAD_HELP,
    check_device,
    check_group,
    check_inner,
    check_model,
    check_own,
    check_said_once,
    check_share,
    metrics_names_option,
    prefix_sharing_option,
    speculative_config_option,
)
from specwire.config.services import ListenConfig
from specwire.config.speculative import (
    ABOVE,
    DFLASH,
    DRAFT_MODEL,
    HEADS,
    INNER_METHODS,
    LAYERS,
    METHODS,
    MTP,
    OWN,
    OWN_ARGUMENTS,
    Own,
    model_draft,
    named_own,
    own_draft,
    parse_method,
    split_hierarchy,
)
from specwire.core import MAX_NUM_DRAFT_TOKENS, MAX_NUM_OUTCOMES, Rule

DRAFT_HELP = (
    f"directory or hub id of the draft model; {', '.join(METHODS)} draft from text without one, METHOD,DIR "
    f"from both; INNER{ABOVE}DIR has {', '.join(INNER_METHODS)} or a smaller model guess the draft's tokens; "
    f"{HEADS}:DIR with heads of the target, {LAYERS}:SKIP with the target less some blocks, {MTP} with its "
    f"layers for multi-token prediction, {DFLASH}:DIR with a block drafter; none decodes plainly"
)
IN_TARGET, IN_SERVICE = PLACEMENTS = ("target", "service")
UP_METRICS_HELP = "HOST:PORT of the coordinator's /metrics; draft and verify take the next two ports"


@dataclass(frozen=True, kw_only=True)
class StackConfig(CheckedConfig):
    """The three services on this machine."""

    target: str = option(EMBEDDED, "directory or hub id of the target model", check=check_model)
    draft: str = option(EMBEDDED, DRAFT_HELP)
    verify_ahead: bool = option(True, VERIFY_AHEAD_HELP)
    speculative_config: str = speculative_config_option()
    suffix_shared: bool = option(False, SUFFIX_SHARED_HELP)
    dtype: str = option("auto", "number format of the target's weights", check=one_of(*DTYPES))
    device: str = option("cpu", "device of the target: cpu, cuda or cuda:N", check=check_device)
    tensor_parallel_size: int = option(1, "devices that share the target, placed by Ray; 1 needs no Ray")
    ray_address: str = option("", "Ray cluster to place them in; empty starts one on this machine")
    replicas: int = option(
        1, "verify services, each with the whole target; on cuda each on a card of its own", check=at_least(1)
    )
    draft_dtype: str = option("auto", "number format of the draft's weights", check=one_of(*DTYPES))
    draft_device: str = option("cpu", "device of the draft: cpu, cuda or cuda:N", check=check_device)
    draft_placement: str = option(AUTO, PLACEMENT_HELP, check=one_of(AUTO, *PLACEMENTS))
    draft_learn: bool = option(False, LEARN_HELP)
    draft_learn_share: float = option(LEARN_SHARE, LEARN_SHARE_HELP)
    chat_template: str = chat_template_option()
    address: str = option(
        "127.0.0.1:7070", "HOST:PORT the coordinator listens on; port 0 picks a free one", check=split_address
    )
    http_address: str = option(
        "", "HOST:PORT for OpenAI's API and the page; empty serves neither", check=check_address
    )
    num_draft_tokens: str = option(AUTO, NUM_DRAFT_TOKENS_HELP, check=count_or_auto(MAX_NUM_DRAFT_TOKENS))
    max_depth: str = option(AUTO, MAX_DEPTH_HELP, check=count_or_auto(MAX_NUM_DRAFT_TOKENS))
    num_outcomes: str = option(AUTO, NUM_OUTCOMES_HELP, check=count_or_auto(MAX_NUM_OUTCOMES))
    rule: str = option(AUTO, RULE_HELP, check=one_of(*RULES))
    draft_rtt_ms: float = option(
        0.0, "round trip to emulate between coordinator and draft, in milliseconds", check=check_amount
    )
    num_kv_tokens: int = option(
        65536, "size of each KV cache, in tokens over all sequences", check=at_least(1)
    )
    prefix_sharing: bool = prefix_sharing_option()
    least_pass_ms: float = option(0.0, f"of the target: {LEAST_PASS_HELP}", check=check_amount)
    num_threads: int = option(0, f"CPU threads for the target; {THREADS_HELP}", check=at_least(0))
    draft_num_threads: int = option(1, f"CPU threads for the draft; {THREADS_HELP}", check=at_least(0))
    start_timeout_s: float = option(
        300.0, "longest wait for the services to be ready, in seconds", check=check_duration
    )
    grace_s: float = option(10.0, GRACE_HELP, check=check_amount)
    log_level: str = log_level_option()
    log_format: str = log_format_option()
    metrics_address: str = option("", UP_METRICS_HELP, check=check_address)
    trace_detail: bool = option(False, TRACE_DETAIL_HELP)
    metrics_names: str = metrics_names_option()

    def __post_init__(self) -> None:
        """Refuse here what a service would only refuse seconds later, and under another flag's name."""
        super().__post_init__()
        check_said_once(
            self.speculative_config,
            self.rule,
            num_draft_tokens=self.num_draft_tokens,
            max_depth=self.max_depth,
        )
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
            check(port < 65534, "metrics_address", self.metrics_address, "leaves no room for two more ports")

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
        check_share("draft_learn_share", self.draft_learn_share)
        if not self.draft_learn:
            return
        check(self.draft_model != NO_DRAFT, "draft_learn", True, f"--draft {self.draft} is no model")
        check(not self.draft_model.startswith(EMULATED), "draft_learn", True, "it has no weights")
        check(not self.target_tokenizer, "draft_learn", True, "does not go together with another vocabulary")

    def _check_own(self) -> None:
        """Refuse what does not go together with a target that drafts for itself."""
        draft, own, given = self.draft, self._named_own, own_draft(self.speculative_config)
        takes = OWN_ARGUMENTS.get(OWN.get(draft, ""), "")
        check(not takes, "draft", draft, f"needs more: {OWN.get(draft)}:{takes}")
        others = [*draft.partition(",")[2].split(ABOVE), *draft.split(ABOVE)[1:]]
        check(MTP not in others, "draft", draft, f"{MTP} is no draft model")
        if not own.source:
            return
        is_named = named_own(draft).source != ""
        agrees = given.source == own.source if given else not self.speculative_config
        check(agrees, "draft", draft, "names another method than --speculative-config")
        alone = draft in (EMBEDDED, NO_DRAFT) or (is_named and not (given and given.model))
        check(alone, "draft", draft, f"is a second draft beside the {own.source} of --speculative-config")
        name = "draft" if is_named else "speculative_config"
        value = getattr(self, name)
        if own.source == LAYERS:
            check(own.argument != "", name, value, f"names no blocks: {LAYERS}:{OWN_ARGUMENTS[LAYERS]}")
        elif OWN_ARGUMENTS[own.source]:
            is_there = own.argument != "" and Path(own.argument).is_dir()
            check(is_there, name, value, f"no directory of {own.source}")
        check_own(name, value, own, self.target, self.tensor_parallel_size)

    @property
    def http_flags(self) -> tuple[str, ...]:
        """The names of the flags that set `http_address`: one, or that of its host and that of its port."""
        return ("http_address",)

    @property
    def requires_tokens(self) -> bool:
        """Whether clients must send a bearer token."""
        return False

    @property
    def fills_memory(self) -> bool:
        """Whether the target's KV cache takes what its device has left, instead of `num_kv_tokens`."""
        return False

    @property
    def verify_options(self) -> dict[str, object]:
        """Further flags of the verify service."""
        return {}

    @property
    def coordinator_options(self) -> dict[str, object]:
        """Further flags of the coordinator."""
        return {}

    @property
    def front_options(self) -> dict[str, object]:
        """Further flags of the HTTP front."""
        return {}

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

    address: str = option("127.0.0.1:7070", "HOST:PORT the coordinator listens on; port 0 picks a free one")

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

    address: str = option(
        "127.0.0.1:0", "HOST:PORT the coordinator listens on; port 0 picks a free one", check=split_address
    )
    draft_placement: str = option(IN_SERVICE, PLACEMENT_HELP, check=one_of(AUTO, *PLACEMENTS))
    num_draft_tokens: str = option("4", NUM_DRAFT_TOKENS_HELP, check=count_or_auto(MAX_NUM_DRAFT_TOKENS))
    log_level: str = log_level_option("warning")


@dataclass(frozen=True, kw_only=True)
class DemoConfig(LiveConfig):
    """`specwire demo`: a target as slow as a large one, and the rule whose text is fixed by the seed."""

    draft_placement: str = option(AUTO, PLACEMENT_HELP, check=one_of(AUTO, *PLACEMENTS))
    num_draft_tokens: str = option(AUTO, NUM_DRAFT_TOKENS_HELP, check=count_or_auto(MAX_NUM_DRAFT_TOKENS))
    least_pass_ms: float = option(30.0, f"of the target: {LEAST_PASS_HELP}", check=check_amount)
    rule: str = option(Rule.GUMBEL.value, RULE_HELP, check=one_of(*RULES))


@dataclass(frozen=True, kw_only=True)
class TuneConfig(StackConfig):
    """`specwire tune`: what is measured, and for how many streams."""

    address: str = option("127.0.0.1:0", "HOST:PORT the coordinator listens on", check=split_address)
    log_level: str = log_level_option("warning")
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
