from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Rule(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RULE_UNSPECIFIED: _ClassVar[Rule]
    RULE_REJECTION: _ClassVar[Rule]
    RULE_GUMBEL: _ClassVar[Rule]
    RULE_BLOCK: _ClassVar[Rule]
    RULE_KSEQ: _ClassVar[Rule]

class Capability(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CAPABILITY_UNSPECIFIED: _ClassVar[Capability]
    CAPABILITY_TREES: _ClassVar[Capability]
    CAPABILITY_PREPARED_OUTCOMES: _ClassVar[Capability]
    CAPABILITY_BATCH_INVARIANT: _ClassVar[Capability]
    CAPABILITY_DRAFTS: _ClassVar[Capability]
    CAPABILITY_GRAMMARS: _ClassVar[Capability]
RULE_UNSPECIFIED: Rule
RULE_REJECTION: Rule
RULE_GUMBEL: Rule
RULE_BLOCK: Rule
RULE_KSEQ: Rule
CAPABILITY_UNSPECIFIED: Capability
CAPABILITY_TREES: Capability
CAPABILITY_PREPARED_OUTCOMES: Capability
CAPABILITY_BATCH_INVARIANT: Capability
CAPABILITY_DRAFTS: Capability
CAPABILITY_GRAMMARS: Capability

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "seed", "rule", "logprobs", "grammar", "min_tokens", "end_token_ids", "adapter")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    END_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    seed: int
    rule: Rule
    logprobs: int
    grammar: Grammar
    min_tokens: int
    end_token_ids: _containers.RepeatedScalarFieldContainer[int]
    adapter: str
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., seed: _Optional[int] = ..., rule: _Optional[_Union[Rule, str]] = ..., logprobs: _Optional[int] = ..., grammar: _Optional[_Union[Grammar, _Mapping]] = ..., min_tokens: _Optional[int] = ..., end_token_ids: _Optional[_Iterable[int]] = ..., adapter: _Optional[str] = ...) -> None: ...

class Grammar(_message.Message):
    __slots__ = ("json_schema", "json_object", "regex", "choice", "ebnf")
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    JSON_OBJECT_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    EBNF_FIELD_NUMBER: _ClassVar[int]
    json_schema: str
    json_object: bool
    regex: str
    choice: Choice
    ebnf: str
    def __init__(self, json_schema: _Optional[str] = ..., json_object: _Optional[bool] = ..., regex: _Optional[str] = ..., choice: _Optional[_Union[Choice, _Mapping]] = ..., ebnf: _Optional[str] = ...) -> None: ...

class Choice(_message.Message):
    __slots__ = ("texts",)
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    texts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, texts: _Optional[_Iterable[str]] = ...) -> None: ...

class OpenSequence(_message.Message):
    __slots__ = ("sequence_id", "sampling", "prompt_len", "vocab_limit", "cache_salt", "timeout_ms", "trace_headers", "may_go_on", "end_len", "may_learn")
    class TraceHeadersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LEN_FIELD_NUMBER: _ClassVar[int]
    VOCAB_LIMIT_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    TRACE_HEADERS_FIELD_NUMBER: _ClassVar[int]
    MAY_GO_ON_FIELD_NUMBER: _ClassVar[int]
    END_LEN_FIELD_NUMBER: _ClassVar[int]
    MAY_LEARN_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    sampling: SamplingParams
    prompt_len: int
    vocab_limit: int
    cache_salt: str
    timeout_ms: int
    trace_headers: _containers.ScalarMap[str, str]
    may_go_on: bool
    end_len: int
    may_learn: bool
    def __init__(self, sequence_id: _Optional[int] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., prompt_len: _Optional[int] = ..., vocab_limit: _Optional[int] = ..., cache_salt: _Optional[str] = ..., timeout_ms: _Optional[int] = ..., trace_headers: _Optional[_Mapping[str, str]] = ..., may_go_on: _Optional[bool] = ..., end_len: _Optional[int] = ..., may_learn: _Optional[bool] = ...) -> None: ...

class SequenceError(_message.Message):
    __slots__ = ("sequence_id", "reason", "message", "fields")
    class FieldsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    reason: str
    message: str
    fields: _containers.ScalarMap[str, str]
    def __init__(self, sequence_id: _Optional[int] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ..., fields: _Optional[_Mapping[str, str]] = ...) -> None: ...

class Proposals(_message.Message):
    __slots__ = ("num_tokens", "token_ids", "parent_indices", "support_lens", "support_token_ids", "support_probs", "num_chains")
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PARENT_INDICES_FIELD_NUMBER: _ClassVar[int]
    SUPPORT_LENS_FIELD_NUMBER: _ClassVar[int]
    SUPPORT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SUPPORT_PROBS_FIELD_NUMBER: _ClassVar[int]
    NUM_CHAINS_FIELD_NUMBER: _ClassVar[int]
    num_tokens: _containers.RepeatedScalarFieldContainer[int]
    token_ids: bytes
    parent_indices: bytes
    support_lens: bytes
    support_token_ids: bytes
    support_probs: bytes
    num_chains: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, num_tokens: _Optional[_Iterable[int]] = ..., token_ids: _Optional[bytes] = ..., parent_indices: _Optional[bytes] = ..., support_lens: _Optional[bytes] = ..., support_token_ids: _Optional[bytes] = ..., support_probs: _Optional[bytes] = ..., num_chains: _Optional[_Iterable[int]] = ...) -> None: ...

class Timings(_message.Message):
    __slots__ = ("queue_ns", "forward_ns", "residence_ns", "stall_ns", "ahead_ns")
    QUEUE_NS_FIELD_NUMBER: _ClassVar[int]
    FORWARD_NS_FIELD_NUMBER: _ClassVar[int]
    RESIDENCE_NS_FIELD_NUMBER: _ClassVar[int]
    STALL_NS_FIELD_NUMBER: _ClassVar[int]
    AHEAD_NS_FIELD_NUMBER: _ClassVar[int]
    queue_ns: _containers.RepeatedScalarFieldContainer[int]
    forward_ns: _containers.RepeatedScalarFieldContainer[int]
    residence_ns: _containers.RepeatedScalarFieldContainer[int]
    stall_ns: _containers.RepeatedScalarFieldContainer[int]
    ahead_ns: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, queue_ns: _Optional[_Iterable[int]] = ..., forward_ns: _Optional[_Iterable[int]] = ..., residence_ns: _Optional[_Iterable[int]] = ..., stall_ns: _Optional[_Iterable[int]] = ..., ahead_ns: _Optional[_Iterable[int]] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("num_waiting", "num_sequences", "base_ns", "sequence_ns", "token_ns", "draft_pass_ns", "draft_node_ns", "prefill_ns", "draft_prefill_ns", "draft_hosted_ns")
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    BASE_NS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_NS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_NS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_PASS_NS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_NODE_NS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_NS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_PREFILL_NS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_HOSTED_NS_FIELD_NUMBER: _ClassVar[int]
    num_waiting: int
    num_sequences: int
    base_ns: int
    sequence_ns: int
    token_ns: int
    draft_pass_ns: int
    draft_node_ns: int
    prefill_ns: int
    draft_prefill_ns: int
    draft_hosted_ns: int
    def __init__(self, num_waiting: _Optional[int] = ..., num_sequences: _Optional[int] = ..., base_ns: _Optional[int] = ..., sequence_ns: _Optional[int] = ..., token_ns: _Optional[int] = ..., draft_pass_ns: _Optional[int] = ..., draft_node_ns: _Optional[int] = ..., prefill_ns: _Optional[int] = ..., draft_prefill_ns: _Optional[int] = ..., draft_hosted_ns: _Optional[int] = ...) -> None: ...

class ModelInfo(_message.Message):
    __slots__ = ("name", "vocab_size", "context_len", "tokenizer_fingerprint", "dtype", "num_parameters", "eos_token_ids", "protocol_version", "incarnation", "tokenizer_source", "capabilities", "weights_fingerprint", "target_tokenizer_fingerprint", "shared_vocab", "shared_text", "inner", "encoder_len", "decoder_token_ids", "learning", "own_source", "chat_template", "least_pass_ms", "tokenizer_hash", "tokenizer_bytes", "host", "devices", "num_cores", "num_threads", "num_ranks", "costs", "adapters", "sampling")
    class AdaptersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LEN_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    NUM_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_SOURCE_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TARGET_TOKENIZER_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    SHARED_VOCAB_FIELD_NUMBER: _ClassVar[int]
    SHARED_TEXT_FIELD_NUMBER: _ClassVar[int]
    INNER_FIELD_NUMBER: _ClassVar[int]
    ENCODER_LEN_FIELD_NUMBER: _ClassVar[int]
    DECODER_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LEARNING_FIELD_NUMBER: _ClassVar[int]
    OWN_SOURCE_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    LEAST_PASS_MS_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_HASH_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_BYTES_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    NUM_CORES_FIELD_NUMBER: _ClassVar[int]
    NUM_THREADS_FIELD_NUMBER: _ClassVar[int]
    NUM_RANKS_FIELD_NUMBER: _ClassVar[int]
    COSTS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    name: str
    vocab_size: int
    context_len: int
    tokenizer_fingerprint: str
    dtype: str
    num_parameters: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    protocol_version: int
    incarnation: str
    tokenizer_source: str
    capabilities: _containers.RepeatedScalarFieldContainer[Capability]
    weights_fingerprint: str
    target_tokenizer_fingerprint: str
    shared_vocab: float
    shared_text: float
    inner: str
    encoder_len: int
    decoder_token_ids: _containers.RepeatedScalarFieldContainer[int]
    learning: Learning
    own_source: str
    chat_template: str
    least_pass_ms: float
    tokenizer_hash: str
    tokenizer_bytes: int
    host: str
    devices: _containers.RepeatedScalarFieldContainer[str]
    num_cores: int
    num_threads: int
    num_ranks: int
    costs: Load
    adapters: _containers.ScalarMap[str, str]
    sampling: SamplingParams
    def __init__(self, name: _Optional[str] = ..., vocab_size: _Optional[int] = ..., context_len: _Optional[int] = ..., tokenizer_fingerprint: _Optional[str] = ..., dtype: _Optional[str] = ..., num_parameters: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., protocol_version: _Optional[int] = ..., incarnation: _Optional[str] = ..., tokenizer_source: _Optional[str] = ..., capabilities: _Optional[_Iterable[_Union[Capability, str]]] = ..., weights_fingerprint: _Optional[str] = ..., target_tokenizer_fingerprint: _Optional[str] = ..., shared_vocab: _Optional[float] = ..., shared_text: _Optional[float] = ..., inner: _Optional[str] = ..., encoder_len: _Optional[int] = ..., decoder_token_ids: _Optional[_Iterable[int]] = ..., learning: _Optional[_Union[Learning, _Mapping]] = ..., own_source: _Optional[str] = ..., chat_template: _Optional[str] = ..., least_pass_ms: _Optional[float] = ..., tokenizer_hash: _Optional[str] = ..., tokenizer_bytes: _Optional[int] = ..., host: _Optional[str] = ..., devices: _Optional[_Iterable[str]] = ..., num_cores: _Optional[int] = ..., num_threads: _Optional[int] = ..., num_ranks: _Optional[int] = ..., costs: _Optional[_Union[Load, _Mapping]] = ..., adapters: _Optional[_Mapping[str, str]] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ...) -> None: ...

class TokenizerFiles(_message.Message):
    __slots__ = ("files",)
    FILES_FIELD_NUMBER: _ClassVar[int]
    files: _containers.RepeatedCompositeFieldContainer[TokenizerFile]
    def __init__(self, files: _Optional[_Iterable[_Union[TokenizerFile, _Mapping]]] = ...) -> None: ...

class TokenizerFile(_message.Message):
    __slots__ = ("name", "content")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    name: str
    content: bytes
    def __init__(self, name: _Optional[str] = ..., content: _Optional[bytes] = ...) -> None: ...

class Learning(_message.Message):
    __slots__ = ("num_steps", "num_judged_tokens", "first_agreement", "agreement", "num_versions", "num_rollbacks")
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_JUDGED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FIRST_AGREEMENT_FIELD_NUMBER: _ClassVar[int]
    AGREEMENT_FIELD_NUMBER: _ClassVar[int]
    NUM_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_ROLLBACKS_FIELD_NUMBER: _ClassVar[int]
    num_steps: int
    num_judged_tokens: int
    first_agreement: float
    agreement: float
    num_versions: int
    num_rollbacks: int
    def __init__(self, num_steps: _Optional[int] = ..., num_judged_tokens: _Optional[int] = ..., first_agreement: _Optional[float] = ..., agreement: _Optional[float] = ..., num_versions: _Optional[int] = ..., num_rollbacks: _Optional[int] = ...) -> None: ...

class EngineStatus(_message.Message):
    __slots__ = ("num_sequences", "num_requests", "num_held_pages", "num_free_pages", "page_size", "num_steps", "num_tokens", "num_preemptions", "num_cached_pages", "num_hit_tokens", "silent_ms")
    NUM_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_HELD_PAGES_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_PAGES_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_PAGES_FIELD_NUMBER: _ClassVar[int]
    NUM_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SILENT_MS_FIELD_NUMBER: _ClassVar[int]
    num_sequences: int
    num_requests: int
    num_held_pages: int
    num_free_pages: int
    page_size: int
    num_steps: int
    num_tokens: int
    num_preemptions: int
    num_cached_pages: int
    num_hit_tokens: int
    silent_ms: int
    def __init__(self, num_sequences: _Optional[int] = ..., num_requests: _Optional[int] = ..., num_held_pages: _Optional[int] = ..., num_free_pages: _Optional[int] = ..., page_size: _Optional[int] = ..., num_steps: _Optional[int] = ..., num_tokens: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., num_cached_pages: _Optional[int] = ..., num_hit_tokens: _Optional[int] = ..., silent_ms: _Optional[int] = ...) -> None: ...
