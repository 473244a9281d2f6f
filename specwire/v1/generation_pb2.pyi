from specwire.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EarlyStopping(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EARLY_STOPPING_UNSPECIFIED: _ClassVar[EarlyStopping]
    EARLY_STOPPING_HEURISTIC: _ClassVar[EarlyStopping]
    EARLY_STOPPING_AT_ONCE: _ClassVar[EarlyStopping]
    EARLY_STOPPING_NEVER: _ClassVar[EarlyStopping]

class Fate(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FATE_UNSPECIFIED: _ClassVar[Fate]
    FATE_ACCEPTED: _ClassVar[Fate]
    FATE_REJECTED: _ClassVar[Fate]
    FATE_RECOVERED: _ClassVar[Fate]
    FATE_BONUS: _ClassVar[Fate]
    FATE_GIVEN: _ClassVar[Fate]
    FATE_PLAIN: _ClassVar[Fate]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
EARLY_STOPPING_UNSPECIFIED: EarlyStopping
EARLY_STOPPING_HEURISTIC: EarlyStopping
EARLY_STOPPING_AT_ONCE: EarlyStopping
EARLY_STOPPING_NEVER: EarlyStopping
FATE_UNSPECIFIED: Fate
FATE_ACCEPTED: Fate
FATE_REJECTED: Fate
FATE_RECOVERED: Fate
FATE_BONUS: Fate
FATE_GIVEN: Fate
FATE_PLAIN: Fate
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason

class GenerateRequest(_message.Message):
    __slots__ = ("text", "token_ids", "messages", "sampling", "stop_conditions", "num_draft_tokens", "max_depth", "draft", "beam_search", "keep_special_tokens", "prompt_logprobs", "prompt_only", "credit_tokens", "report_progress", "generated_token_ids", "cache_salt", "context_digest")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOP_CONDITIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_DEPTH_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    BEAM_SEARCH_FIELD_NUMBER: _ClassVar[int]
    KEEP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_ONLY_FIELD_NUMBER: _ClassVar[int]
    CREDIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REPORT_PROGRESS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: TokenIds
    messages: Messages
    sampling: _common_pb2.SamplingParams
    stop_conditions: StopConditions
    num_draft_tokens: int
    max_depth: int
    draft: str
    beam_search: BeamSearch
    keep_special_tokens: bool
    prompt_logprobs: int
    prompt_only: bool
    credit_tokens: int
    report_progress: bool
    generated_token_ids: _containers.RepeatedScalarFieldContainer[int]
    cache_salt: str
    context_digest: str
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., messages: _Optional[_Union[Messages, _Mapping]] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., stop_conditions: _Optional[_Union[StopConditions, _Mapping]] = ..., num_draft_tokens: _Optional[int] = ..., max_depth: _Optional[int] = ..., draft: _Optional[str] = ..., beam_search: _Optional[_Union[BeamSearch, _Mapping]] = ..., keep_special_tokens: _Optional[bool] = ..., prompt_logprobs: _Optional[int] = ..., prompt_only: _Optional[bool] = ..., credit_tokens: _Optional[int] = ..., report_progress: _Optional[bool] = ..., generated_token_ids: _Optional[_Iterable[int]] = ..., cache_salt: _Optional[str] = ..., context_digest: _Optional[str] = ...) -> None: ...

class BeamSearch(_message.Message):
    __slots__ = ("num_beams", "length_penalty", "early_stopping", "num_return_sequences")
    NUM_BEAMS_FIELD_NUMBER: _ClassVar[int]
    LENGTH_PENALTY_FIELD_NUMBER: _ClassVar[int]
    EARLY_STOPPING_FIELD_NUMBER: _ClassVar[int]
    NUM_RETURN_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    num_beams: int
    length_penalty: float
    early_stopping: EarlyStopping
    num_return_sequences: int
    def __init__(self, num_beams: _Optional[int] = ..., length_penalty: _Optional[float] = ..., early_stopping: _Optional[_Union[EarlyStopping, str]] = ..., num_return_sequences: _Optional[int] = ...) -> None: ...

class Hypothesis(_message.Message):
    __slots__ = ("token_ids", "text", "score", "finish_reason", "stop_token_id")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    text: str
    score: float
    finish_reason: FinishReason
    stop_token_id: int
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ..., score: _Optional[float] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., stop_token_id: _Optional[int] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Messages(_message.Message):
    __slots__ = ("messages", "tools", "template_kwargs")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_KWARGS_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[Message]
    tools: str
    template_kwargs: str
    def __init__(self, messages: _Optional[_Iterable[_Union[Message, _Mapping]]] = ..., tools: _Optional[str] = ..., template_kwargs: _Optional[str] = ...) -> None: ...

class Message(_message.Message):
    __slots__ = ("role", "content", "other_fields")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    OTHER_FIELDS_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    other_fields: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ..., other_fields: _Optional[str] = ...) -> None: ...

class StopConditions(_message.Message):
    __slots__ = ("max_tokens", "stop", "stop_token_ids", "ignore_eos")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    def __init__(self, max_tokens: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("chunk", "completion", "resume_info")
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_FIELD_NUMBER: _ClassVar[int]
    RESUME_INFO_FIELD_NUMBER: _ClassVar[int]
    chunk: Chunk
    completion: Completion
    resume_info: ResumeInfo
    def __init__(self, chunk: _Optional[_Union[Chunk, _Mapping]] = ..., completion: _Optional[_Union[Completion, _Mapping]] = ..., resume_info: _Optional[_Union[ResumeInfo, _Mapping]] = ...) -> None: ...

class ResumeInfo(_message.Message):
    __slots__ = ("seed", "rule", "context_digest")
    SEED_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    seed: int
    rule: _common_pb2.Rule
    context_digest: str
    def __init__(self, seed: _Optional[int] = ..., rule: _Optional[_Union[_common_pb2.Rule, str]] = ..., context_digest: _Optional[str] = ...) -> None: ...

class Token(_message.Message):
    __slots__ = ("id", "text", "fate", "logprob", "top_logprobs", "source")
    ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    FATE_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    id: int
    text: str
    fate: Fate
    logprob: float
    top_logprobs: _containers.RepeatedCompositeFieldContainer[TopLogprob]
    source: int
    def __init__(self, id: _Optional[int] = ..., text: _Optional[str] = ..., fate: _Optional[_Union[Fate, str]] = ..., logprob: _Optional[float] = ..., top_logprobs: _Optional[_Iterable[_Union[TopLogprob, _Mapping]]] = ..., source: _Optional[int] = ...) -> None: ...

class TopLogprob(_message.Message):
    __slots__ = ("token_id", "logprob")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("first_index", "tokens", "rejected", "speculation", "timing", "held", "sources", "tree", "prompt", "first_prompt_index")
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    TREE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    FIRST_PROMPT_INDEX_FIELD_NUMBER: _ClassVar[int]
    first_index: int
    tokens: _containers.RepeatedCompositeFieldContainer[Token]
    rejected: _containers.RepeatedCompositeFieldContainer[Token]
    speculation: Speculation
    timing: GenerationTiming
    held: _containers.RepeatedCompositeFieldContainer[Token]
    sources: _containers.RepeatedScalarFieldContainer[str]
    tree: DraftTree
    prompt: _containers.RepeatedCompositeFieldContainer[Token]
    first_prompt_index: int
    def __init__(self, first_index: _Optional[int] = ..., tokens: _Optional[_Iterable[_Union[Token, _Mapping]]] = ..., rejected: _Optional[_Iterable[_Union[Token, _Mapping]]] = ..., speculation: _Optional[_Union[Speculation, _Mapping]] = ..., timing: _Optional[_Union[GenerationTiming, _Mapping]] = ..., held: _Optional[_Iterable[_Union[Token, _Mapping]]] = ..., sources: _Optional[_Iterable[str]] = ..., tree: _Optional[_Union[DraftTree, _Mapping]] = ..., prompt: _Optional[_Iterable[_Union[Token, _Mapping]]] = ..., first_prompt_index: _Optional[int] = ...) -> None: ...

class DraftTree(_message.Message):
    __slots__ = ("source", "token_ids", "texts", "parents", "path")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    source: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    texts: _containers.RepeatedScalarFieldContainer[str]
    parents: _containers.RepeatedScalarFieldContainer[int]
    path: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, source: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., texts: _Optional[_Iterable[str]] = ..., parents: _Optional[_Iterable[int]] = ..., path: _Optional[_Iterable[int]] = ...) -> None: ...

class Completion(_message.Message):
    __slots__ = ("finish_reason", "stop_string", "stop_token_id", "seed", "model", "usage", "speculation", "timing", "rule", "reproducible", "hypotheses", "why_not_reproducible")
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    REPRODUCIBLE_FIELD_NUMBER: _ClassVar[int]
    HYPOTHESES_FIELD_NUMBER: _ClassVar[int]
    WHY_NOT_REPRODUCIBLE_FIELD_NUMBER: _ClassVar[int]
    finish_reason: FinishReason
    stop_string: str
    stop_token_id: int
    seed: int
    model: str
    usage: Usage
    speculation: Speculation
    timing: GenerationTiming
    rule: _common_pb2.Rule
    reproducible: bool
    hypotheses: _containers.RepeatedCompositeFieldContainer[Hypothesis]
    why_not_reproducible: str
    def __init__(self, finish_reason: _Optional[_Union[FinishReason, str]] = ..., stop_string: _Optional[str] = ..., stop_token_id: _Optional[int] = ..., seed: _Optional[int] = ..., model: _Optional[str] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., speculation: _Optional[_Union[Speculation, _Mapping]] = ..., timing: _Optional[_Union[GenerationTiming, _Mapping]] = ..., rule: _Optional[_Union[_common_pb2.Rule, str]] = ..., reproducible: _Optional[bool] = ..., hypotheses: _Optional[_Iterable[_Union[Hypothesis, _Mapping]]] = ..., why_not_reproducible: _Optional[str] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "completion_tokens", "cached_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class Speculation(_message.Message):
    __slots__ = ("num_rounds", "num_draft_tokens", "num_accepted_tokens", "acceptance_histogram", "drafted_per_position", "accepted_per_position", "draft_unavailable", "num_prepared", "by_source", "why_plain", "num_tokens")
    NUM_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_HISTOGRAM_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_PER_POSITION_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_PER_POSITION_FIELD_NUMBER: _ClassVar[int]
    DRAFT_UNAVAILABLE_FIELD_NUMBER: _ClassVar[int]
    NUM_PREPARED_FIELD_NUMBER: _ClassVar[int]
    BY_SOURCE_FIELD_NUMBER: _ClassVar[int]
    WHY_PLAIN_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_rounds: int
    num_draft_tokens: int
    num_accepted_tokens: int
    acceptance_histogram: _containers.RepeatedScalarFieldContainer[int]
    drafted_per_position: _containers.RepeatedScalarFieldContainer[int]
    accepted_per_position: _containers.RepeatedScalarFieldContainer[int]
    draft_unavailable: str
    num_prepared: int
    by_source: _containers.RepeatedCompositeFieldContainer[SourceCounts]
    why_plain: str
    num_tokens: int
    def __init__(self, num_rounds: _Optional[int] = ..., num_draft_tokens: _Optional[int] = ..., num_accepted_tokens: _Optional[int] = ..., acceptance_histogram: _Optional[_Iterable[int]] = ..., drafted_per_position: _Optional[_Iterable[int]] = ..., accepted_per_position: _Optional[_Iterable[int]] = ..., draft_unavailable: _Optional[str] = ..., num_prepared: _Optional[int] = ..., by_source: _Optional[_Iterable[_Union[SourceCounts, _Mapping]]] = ..., why_plain: _Optional[str] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class SourceCounts(_message.Message):
    __slots__ = ("source", "num_drafts", "num_draft_tokens", "num_accepted_tokens")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    source: str
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    def __init__(self, source: _Optional[str] = ..., num_drafts: _Optional[int] = ..., num_draft_tokens: _Optional[int] = ..., num_accepted_tokens: _Optional[int] = ...) -> None: ...

class GenerationTiming(_message.Message):
    __slots__ = ("total_ms", "time_to_first_token_ms", "draft_ms", "verify_ms", "rule_ms", "admission_ms", "draft_queue_ms", "draft_network_ms", "verify_queue_ms", "verify_network_ms", "emit_ms", "client_credit_ms", "failover_ms", "coordinator_ms", "ahead_ms")
    TOTAL_MS_FIELD_NUMBER: _ClassVar[int]
    TIME_TO_FIRST_TOKEN_MS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_MS_FIELD_NUMBER: _ClassVar[int]
    VERIFY_MS_FIELD_NUMBER: _ClassVar[int]
    RULE_MS_FIELD_NUMBER: _ClassVar[int]
    ADMISSION_MS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_NETWORK_MS_FIELD_NUMBER: _ClassVar[int]
    VERIFY_QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    VERIFY_NETWORK_MS_FIELD_NUMBER: _ClassVar[int]
    EMIT_MS_FIELD_NUMBER: _ClassVar[int]
    CLIENT_CREDIT_MS_FIELD_NUMBER: _ClassVar[int]
    FAILOVER_MS_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_MS_FIELD_NUMBER: _ClassVar[int]
    AHEAD_MS_FIELD_NUMBER: _ClassVar[int]
    total_ms: float
    time_to_first_token_ms: float
    draft_ms: float
    verify_ms: float
    rule_ms: float
    admission_ms: float
    draft_queue_ms: float
    draft_network_ms: float
    verify_queue_ms: float
    verify_network_ms: float
    emit_ms: float
    client_credit_ms: float
    failover_ms: float
    coordinator_ms: float
    ahead_ms: float
    def __init__(self, total_ms: _Optional[float] = ..., time_to_first_token_ms: _Optional[float] = ..., draft_ms: _Optional[float] = ..., verify_ms: _Optional[float] = ..., rule_ms: _Optional[float] = ..., admission_ms: _Optional[float] = ..., draft_queue_ms: _Optional[float] = ..., draft_network_ms: _Optional[float] = ..., verify_queue_ms: _Optional[float] = ..., verify_network_ms: _Optional[float] = ..., emit_ms: _Optional[float] = ..., client_credit_ms: _Optional[float] = ..., failover_ms: _Optional[float] = ..., coordinator_ms: _Optional[float] = ..., ahead_ms: _Optional[float] = ...) -> None: ...

class GetModelInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetModelInfoResponse(_message.Message):
    __slots__ = ("target", "draft", "num_draft_tokens")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    target: _common_pb2.ModelInfo
    draft: _common_pb2.ModelInfo
    num_draft_tokens: int
    def __init__(self, target: _Optional[_Union[_common_pb2.ModelInfo, _Mapping]] = ..., draft: _Optional[_Union[_common_pb2.ModelInfo, _Mapping]] = ..., num_draft_tokens: _Optional[int] = ...) -> None: ...

class GetTokenizerRequest(_message.Message):
    __slots__ = ("offset",)
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    offset: int
    def __init__(self, offset: _Optional[int] = ...) -> None: ...

class GetTokenizerResponse(_message.Message):
    __slots__ = ("page",)
    PAGE_FIELD_NUMBER: _ClassVar[int]
    page: bytes
    def __init__(self, page: _Optional[bytes] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ("if_num_streams",)
    IF_NUM_STREAMS_FIELD_NUMBER: _ClassVar[int]
    if_num_streams: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, if_num_streams: _Optional[_Iterable[int]] = ...) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("num_running", "num_finished", "draft_unavailable", "uptime_ms", "num_waiting", "verify_replicas", "draft_replicas", "num_paused", "by_source", "why_plain", "ways", "num_workers", "choices")
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_FINISHED_FIELD_NUMBER: _ClassVar[int]
    DRAFT_UNAVAILABLE_FIELD_NUMBER: _ClassVar[int]
    UPTIME_MS_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    VERIFY_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    NUM_PAUSED_FIELD_NUMBER: _ClassVar[int]
    BY_SOURCE_FIELD_NUMBER: _ClassVar[int]
    WHY_PLAIN_FIELD_NUMBER: _ClassVar[int]
    WAYS_FIELD_NUMBER: _ClassVar[int]
    NUM_WORKERS_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    num_running: int
    num_finished: int
    draft_unavailable: str
    uptime_ms: int
    num_waiting: int
    verify_replicas: _containers.RepeatedCompositeFieldContainer[ReplicaStatus]
    draft_replicas: _containers.RepeatedCompositeFieldContainer[ReplicaStatus]
    num_paused: int
    by_source: _containers.RepeatedCompositeFieldContainer[SourceTotals]
    why_plain: str
    ways: _containers.RepeatedCompositeFieldContainer[WayStatus]
    num_workers: int
    choices: _containers.RepeatedCompositeFieldContainer[ChoiceStatus]
    def __init__(self, num_running: _Optional[int] = ..., num_finished: _Optional[int] = ..., draft_unavailable: _Optional[str] = ..., uptime_ms: _Optional[int] = ..., num_waiting: _Optional[int] = ..., verify_replicas: _Optional[_Iterable[_Union[ReplicaStatus, _Mapping]]] = ..., draft_replicas: _Optional[_Iterable[_Union[ReplicaStatus, _Mapping]]] = ..., num_paused: _Optional[int] = ..., by_source: _Optional[_Iterable[_Union[SourceTotals, _Mapping]]] = ..., why_plain: _Optional[str] = ..., ways: _Optional[_Iterable[_Union[WayStatus, _Mapping]]] = ..., num_workers: _Optional[int] = ..., choices: _Optional[_Iterable[_Union[ChoiceStatus, _Mapping]]] = ...) -> None: ...

class ChoiceStatus(_message.Message):
    __slots__ = ("num_streams", "ways")
    NUM_STREAMS_FIELD_NUMBER: _ClassVar[int]
    WAYS_FIELD_NUMBER: _ClassVar[int]
    num_streams: int
    ways: _containers.RepeatedCompositeFieldContainer[WayStatus]
    def __init__(self, num_streams: _Optional[int] = ..., ways: _Optional[_Iterable[_Union[WayStatus, _Mapping]]] = ...) -> None: ...

class WayStatus(_message.Message):
    __slots__ = ("name", "is_chosen", "expected_tokens_per_s", "measured_tokens_per_s")
    NAME_FIELD_NUMBER: _ClassVar[int]
    IS_CHOSEN_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    MEASURED_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    name: str
    is_chosen: bool
    expected_tokens_per_s: float
    measured_tokens_per_s: float
    def __init__(self, name: _Optional[str] = ..., is_chosen: _Optional[bool] = ..., expected_tokens_per_s: _Optional[float] = ..., measured_tokens_per_s: _Optional[float] = ...) -> None: ...

class SourceTotals(_message.Message):
    __slots__ = ("source", "num_drafts", "num_draft_tokens", "num_accepted_tokens")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    source: str
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    def __init__(self, source: _Optional[str] = ..., num_drafts: _Optional[int] = ..., num_draft_tokens: _Optional[int] = ..., num_accepted_tokens: _Optional[int] = ...) -> None: ...

class ReplicaStatus(_message.Message):
    __slots__ = ("address", "unavailable", "num_streams", "num_other_streams", "num_lost")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    UNAVAILABLE_FIELD_NUMBER: _ClassVar[int]
    NUM_STREAMS_FIELD_NUMBER: _ClassVar[int]
    NUM_OTHER_STREAMS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOST_FIELD_NUMBER: _ClassVar[int]
    address: str
    unavailable: str
    num_streams: int
    num_other_streams: int
    num_lost: int
    def __init__(self, address: _Optional[str] = ..., unavailable: _Optional[str] = ..., num_streams: _Optional[int] = ..., num_other_streams: _Optional[int] = ..., num_lost: _Optional[int] = ...) -> None: ...
