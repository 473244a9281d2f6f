"""Names of models and drafts: their flags' help, and checks that services and stacks share."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from specwire.config.blocks import check_layers
from specwire.config.fields import AUTO, check, one_of, parse_count
from specwire.config.flags import did_you_mean, option
from specwire.config.speculative import (
    ABOVE,
    DRAFT_MODEL,
    INNER_METHODS,
    KSEQ,
    LAYERS,
    METHODS,
    OWN,
    Own,
    check_speculative_config,
    model_draft,
    named_own,
)
from specwire.core import MAX_NUM_DRAFT_TOKENS, MAX_NUM_OUTCOMES, Rule

EMBEDDED = "embedded"
EMULATED = "emulated:"
NO_DRAFT = "none"
VLLM = "vllm"
METRICS_NAMES = ("specwire", VLLM)
DTYPES = ("auto", "float32", "bfloat16", "float16")
RULES = (AUTO, *Rule)
RULE_HELP = (
    "rule of requests that name none; auto takes gumbel for a given seed, else kseq where that is selected, "
    "else gumbel for a far draft, else block"
)
NUM_OUTCOMES_HELP = "outcomes of a round that the draft prepares for: a number, or auto for what pays"
VERIFY_AHEAD_HELP = "let verify go on by itself with prepared proposals, before the coordinator asks for it"
MAX_DEPTH_HELP = "longest path of token trees, 0 for chains: a number, or auto for what pays"
NUM_DRAFT_TOKENS_HELP = "draft tokens a round when a request does not say: a number, or auto for what pays"
LEARN_HELP = "let the draft learn from the target's tokens while it serves"
LEARN_SHARE = 0.2
LEARN_SHARE_HELP = "most of the draft's time that learning may take while no request waits, in (0, 1]"
LEAST_PASS_HELP = (
    "least milliseconds of a forward pass, to emulate a larger model; the rest is slept; 0: none"
)
THREADS_HELP = "0: OMP_NUM_THREADS, or as many as other processes leave cores free"
PLACEMENT_HELP = (
    "where the draft model runs: target, in the target's process, or service, in one of its own; auto is "
    "target where both have one device, and nothing is asked for that a service alone has"
)
TRACE_DETAIL_HELP = "record finer spans: the rule, and queue and passes of each request"
SUFFIX_SHARED_HELP = (
    "draft from earlier outputs of all clients, not only from those of the same token and cache_salt; drafts "
    "that are rejected show them"
)
_DEVICE = re.compile(r"cpu|cuda(:[0-9]{1,3})?")
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def parse_num_draft_tokens(value: str) -> int | None:
    """A number of draft tokens; None for `auto`.

    Raises:
        ConfigError: naming the flag and the value.
    """
    return parse_count("num_draft_tokens", value, MAX_NUM_DRAFT_TOKENS)


def parse_max_depth(value: str) -> int | None:
    """The longest path of a tree; None for `auto`. Errors as for `parse_num_draft_tokens`."""
    return parse_count("max_depth", value, MAX_NUM_DRAFT_TOKENS)


def parse_num_outcomes(value: str) -> int | None:
    """A number of outcomes to prepare for; None for `auto`. Errors as for `parse_num_draft_tokens`."""
    return parse_count("num_outcomes", value, MAX_NUM_OUTCOMES)


def check_said_once(speculative_config: str, rule: str, *, num_draft_tokens: str, max_depth: str) -> None:
    """Refuse what a flag and `speculative_config` both fix, or fix differently."""
    given = model_draft(speculative_config)
    for name, fixed, value in (
        ("num_draft_tokens", given.num_speculative_tokens, num_draft_tokens),
        ("max_depth", given.max_depth, max_depth),
    ):
        check(fixed is None or value == AUTO, name, value, f"is {fixed} in --speculative-config")
    problem = f"contradicts selection {KSEQ} in --speculative-config"
    check(not given.selection or rule in (AUTO, Rule.KSEQ), "rule", rule, problem)


def check_group(num_ranks: int, ray_address: str, model: str, device: str) -> None:
    """Refuse what several devices, or Ray, cannot serve."""
    name = "tensor_parallel_size"
    check(num_ranks >= 1, name, num_ranks, "must be at least 1")
    if num_ranks == 1:
        check(
            not ray_address, "ray_address", ray_address, "is of use with --tensor-parallel-size over 1 only"
        )
        return
    check(not model.startswith(EMULATED), name, num_ranks, f"does not apply to {model}")
    placed = device in ("cpu", "cuda")
    check(placed, "device", device, f"must be cpu or cuda with --tensor-parallel-size {num_ranks}")


def check_inner(name: str, inner: str, model: str, num_devices: int) -> None:
    """Refuse what cannot guess the tokens of a draft."""
    both = f"{inner}{ABOVE}{model}"
    check(ABOVE not in inner + model, name, both, "has more than one inner drafter")
    check(is_model(model), name, both, f"{model} is no draft model, whose tokens could be guessed")
    known = inner in INNER_METHODS or (is_model(inner) and not inner.startswith(EMULATED))
    check(known, name, both, f"{inner} is none of {', '.join(INNER_METHODS)}, and no model")
    if inner not in INNER_METHODS:
        check_model(name, inner)
        check(not model.startswith(EMULATED), name, both, f"{model} has no tokenizer to compare")
    check(num_devices == 1, name, both, "is served on one device only")


def is_model(draft: str) -> bool:
    """Whether it names a model, and no method."""
    return draft not in ("", *METHODS, NO_DRAFT, *OWN) and not named_own(draft).source


def check_own(name: str, value: object, own: Own, target: str, num_devices: int) -> None:
    """Refuse a target that cannot draft for itself in this way.

    Args:
        name, value: of the flag that says so.
    """
    if own.source == DRAFT_MODEL:
        lacks = "device that a draft model could share"
    else:
        lacks = "layers" if own.source == LAYERS else "hidden states"
    check(not target.startswith(EMULATED), name, value, f"{target} has no {lacks}")
    check(num_devices == 1, name, value, "is served with --tensor-parallel-size 1 only")
    if own.source == LAYERS:
        check_layers(name, own.argument)
    if own.source == DRAFT_MODEL:
        check_model(name, own.argument)
        check(not own.argument.startswith(EMULATED), name, value, "is emulated; give it a service of its own")


def check_share(name: str, share: float) -> None:
    """A share in (0, 1]."""
    check(0 < share <= 1, name, share, "must lie in (0, 1]")


def check_model(name: str, source: str, others: Iterable[str] = ()) -> None:
    """A model directory, or a possible hub id, which is resolved by the preflight.

    Args:
        others: what the flag may name instead; a near miss of these is no hub id.

    Raises:
        ConfigError: naming the flag and the source.
    """
    if source == EMBEDDED or source.startswith(EMULATED) or (source and Path(source).is_dir()):
        return
    near = did_you_mean(source, (EMBEDDED, EMULATED, *others))
    is_hub_id = not Path(source).exists() and _HUB_ID.fullmatch(source) is not None
    check(is_hub_id and not near, name, source, f"no such model directory{near}")


def check_device(name: str, device: str) -> None:
    """A device by torch's name. Raises ConfigError, naming the flag and the device."""
    check(_DEVICE.fullmatch(device) is not None, name, device, "is neither cpu nor cuda nor cuda:N")


def prefix_sharing_option() -> Any:
    """The field `prefix_sharing`."""
    doc = "share KV cache pages of equal prefixes between sequences; also --enable-prefix-caching"
    return option(True, doc, alias="enable_prefix_caching")


def metrics_names_option() -> Any:
    """The field `metrics_names`."""
    doc = "names of the metrics: specwire's own, or vLLM's for those that it has too"
    return option(METRICS_NAMES[0], doc, check=one_of(*METRICS_NAMES))


def speculative_config_option() -> Any:
    """The field `speculative_config`."""
    doc = 'JSON: {"method": "ngram", "prompt_lookup_max": 4}; empty drafts with the model alone'
    return option("", doc, metavar="JSON", check=check_speculative_config)
