"""Drafts from another machine inside vLLM: `--speculative-config '{"method": "custom_class", ...}'`.

    vllm serve MODEL --speculative-config \\
        '{"method": "custom_class", "model": "specwire.vllm.RemoteDraft", "num_speculative_tokens": 8}' \\
        --additional-config '{"specwire": {"draft_address": "10.0.0.7:7071"}}'

vLLM asks for the proposals of a step with the tokens of its rows, and judges them by its own rule. Everything
else is `coordinator.batches`. docs/vllm.md says how to use it.
"""

from __future__ import annotations

import argparse
import atexit
import os
from collections.abc import Mapping, Sequence
from typing import Any

from coordinator.batches import BatchDrafter, StepRow
from specwire.config.flags import env_name, parse_mapping, read_config, settings_of
from specwire.config.services import CoordinatorConfig
from specwire.core import MAX_NUM_DRAFT_TOKENS, ModelInfo
from specwire.engine.place import host
from specwire.errors import ConfigError
from specwire.text import tokenizer

VERSIONS = ((0, 22), (0, 33))
"""Of vLLM, first and last, that call `propose` like this."""
OPTIONS = (
    *("draft_address", "draft_timeout_ms", "num_draft_tokens", "num_outcomes", "speculative_config"),
    *("peer_ca", "peer_cert", "peer_key", "peer_server_name", "peer_token_file", "allow_plaintext"),
)
"""Of the coordinator's flags, those that mean something here."""


class RemoteDraft:
    """vLLM's seam for drafts: it is made with vLLM's config, and `propose` is called after each step."""

    def __init__(self, vllm_config: Any) -> None:
        """Connect, on the first rank.

        Raises:
            ConfigError: an option is unknown, or its value is not possible; or vLLM is of another version.
            HandshakeError: the draft has another tokenizer.
            ServiceUnavailableError: no draft answers.
        """
        import vllm
        from vllm.distributed.parallel_state import get_tp_group

        check_version(vllm.__version__)
        most = vllm_config.speculative_config.num_speculative_tokens
        if most > MAX_NUM_DRAFT_TOKENS:
            raise ConfigError(f"num_speculative_tokens {most}: a draft has at most {MAX_NUM_DRAFT_TOKENS}")
        self._group, self._drafts = get_tp_group(), None
        if self._group.rank_in_group == 0:
            given = (vllm_config.additional_config or {}).get("specwire", {})
            self._drafts = BatchDrafter(read_options(given, os.environ), _target(vllm_config), most)
            atexit.register(self._drafts.close)
            self._metrics = _Metrics()

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: the draft service has loaded its own."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """[num_rows] draft tokens to judge in the next step.

        Args:
            sampled_token_ids: [num_rows] what the step has added; nothing for prompts that are not whole yet.
            num_tokens_no_spec: [≥ num_rows] tokens so far.
            token_ids_cpu: [≥ num_rows, longest] these.
        """
        found: list[list[int]] = []
        if self._drafts is not None:
            found = self._drafts.propose(
                [
                    StepRow(token_ids_cpu[i], int(num_tokens_no_spec[i]), len(new)) if new else None
                    for i, new in enumerate(sampled_token_ids)
                ]
            )
            self._metrics.add(self._drafts)
        if self._group.world_size > 1:
            found = self._group.broadcast_object(found, src=0)
        return found


def check_version(version: str) -> None:
    """Raises:
    ConfigError: vLLM's seam is another one there, as far as is known.
    """
    first, last = VERSIONS
    given = tuple(map(int, version.split(".")[:2]))
    if not first <= given <= last:
        known = " to ".join(".".join(map(str, each)) for each in VERSIONS)
        raise ConfigError(f"vLLM {version}: this plug-in is for {known}")


def read_options(given: Mapping[str, Any], environ: Mapping[str, str]) -> CoordinatorConfig:
    """From `--additional-config '{"specwire": {...}}'`, and `SPECWIRE_*` variables.

    Raises:
        ConfigError: naming an option and its value.
    """
    fields = [field for field in settings_of(CoordinatorConfig) if field.name in OPTIONS]
    where = "additional_config: specwire."
    values, keys = parse_mapping(where, given, fields)
    labels = {name: f"{where}{key}:" for name, key in keys.items()}
    names = {env_name(name) for name in OPTIONS}
    ours = {name: value for name, value in environ.items() if name in names}
    config = read_config(CoordinatorConfig, argparse.Namespace(**values, given=labels), ours)
    if not config.draft_address:
        name = env_name("draft_address")
        raise ConfigError(
            f"additional_config: specwire.draft_address: unset, and so is {name}: where the draft is"
        )
    return config


def _target(vllm_config: Any) -> ModelInfo:
    """vLLM's model, as a verify service would describe it."""
    import torch

    model = vllm_config.model_config
    loaded = None if model.skip_tokenizer_init else tokenizer.load(model.tokenizer)
    devices = [torch.cuda.get_device_properties(i).uuid for i in range(torch.cuda.device_count())]
    return ModelInfo(
        name=model.model,
        vocab_size=model.get_vocab_size(),
        context_len=model.max_model_len,
        tokenizer_fingerprint="" if loaded is None else loaded.fingerprint,
        host=host(),
        devices=tuple(map(str, devices)),
        num_cores=os.cpu_count() or 1,
        num_threads=torch.get_num_threads(),
    )


class _Metrics:
    """In vLLM's own registry; of an engine in a process of its own, with PROMETHEUS_MULTIPROC_DIR."""

    def __init__(self) -> None:
        from prometheus_client import Counter

        self._proposals = Counter("specwire_draft_proposals", "Proposals that were wanted", ["outcome"])
        self._drafted = Counter("specwire_draft_tokens", "Draft tokens that were given to vLLM")
        self._accepted = Counter("specwire_draft_accepted_tokens", "Draft tokens that it accepted")
        self._waited = Counter("specwire_draft_wait_seconds", "Time that steps were held up")

    def add(self, drafts: BatchDrafter) -> None:
        """What was counted since the last time."""
        counts = drafts.take_counts()
        for outcome, number in counts.outcomes.items():
            self._proposals.labels(outcome).inc(number)
        self._drafted.inc(counts.num_draft_tokens)
        self._accepted.inc(counts.num_accepted_tokens)
        self._waited.inc(counts.waited_ns / 1e9)
