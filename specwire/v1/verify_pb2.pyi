from specwire.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class VerifyRequest(_message.Message):
    __slots__ = ("open", "close", "sequence_ids", "request_ids", "base_lens", "num_tokens", "token_ids", "proposals", "traceparents", "ahead_ids", "ahead", "num_next_draft_tokens", "next_max_depths", "num_plain_ahead")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    BASE_LENS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROPOSALS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENTS_FIELD_NUMBER: _ClassVar[int]
    AHEAD_IDS_FIELD_NUMBER: _ClassVar[int]
    AHEAD_FIELD_NUMBER: _ClassVar[int]
    NUM_NEXT_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NEXT_MAX_DEPTHS_FIELD_NUMBER: _ClassVar[int]
    NUM_PLAIN_AHEAD_FIELD_NUMBER: _ClassVar[int]
    open: _containers.RepeatedCompositeFieldContainer[_common_pb2.OpenSequence]
    close: _containers.RepeatedScalarFieldContainer[int]
    sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    request_ids: _containers.RepeatedScalarFieldContainer[int]
    base_lens: _containers.RepeatedScalarFieldContainer[int]
    num_tokens: _containers.RepeatedScalarFieldContainer[int]
    token_ids: bytes
    proposals: _common_pb2.Proposals
    traceparents: _containers.RepeatedScalarFieldContainer[str]
    ahead_ids: _containers.RepeatedScalarFieldContainer[int]
    ahead: AheadProposals
    num_next_draft_tokens: _containers.RepeatedScalarFieldContainer[int]
    next_max_depths: _containers.RepeatedScalarFieldContainer[int]
    num_plain_ahead: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, open: _Optional[_Iterable[_Union[_common_pb2.OpenSequence, _Mapping]]] = ..., close: _Optional[_Iterable[int]] = ..., sequence_ids: _Optional[_Iterable[int]] = ..., request_ids: _Optional[_Iterable[int]] = ..., base_lens: _Optional[_Iterable[int]] = ..., num_tokens: _Optional[_Iterable[int]] = ..., token_ids: _Optional[bytes] = ..., proposals: _Optional[_Union[_common_pb2.Proposals, _Mapping]] = ..., traceparents: _Optional[_Iterable[str]] = ..., ahead_ids: _Optional[_Iterable[int]] = ..., ahead: _Optional[_Union[AheadProposals, _Mapping]] = ..., num_next_draft_tokens: _Optional[_Iterable[int]] = ..., next_max_depths: _Optional[_Iterable[int]] = ..., num_plain_ahead: _Optional[_Iterable[int]] = ...) -> None: ...

class AheadProposals(_message.Message):
    __slots__ = ("sequence_ids", "ahead_ids", "base_lens", "path_lens", "path_token_ids", "proposals")
    SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    AHEAD_IDS_FIELD_NUMBER: _ClassVar[int]
    BASE_LENS_FIELD_NUMBER: _ClassVar[int]
    PATH_LENS_FIELD_NUMBER: _ClassVar[int]
    PATH_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROPOSALS_FIELD_NUMBER: _ClassVar[int]
    sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    ahead_ids: _containers.RepeatedScalarFieldContainer[int]
    base_lens: _containers.RepeatedScalarFieldContainer[int]
    path_lens: _containers.RepeatedScalarFieldContainer[int]
    path_token_ids: bytes
    proposals: _common_pb2.Proposals
    def __init__(self, sequence_ids: _Optional[_Iterable[int]] = ..., ahead_ids: _Optional[_Iterable[int]] = ..., base_lens: _Optional[_Iterable[int]] = ..., path_lens: _Optional[_Iterable[int]] = ..., path_token_ids: _Optional[bytes] = ..., proposals: _Optional[_Union[_common_pb2.Proposals, _Mapping]] = ...) -> None: ...

class VerifyResponse(_message.Message):
    __slots__ = ("incarnation", "load", "errors", "sequence_ids", "request_ids", "base_lens", "timings", "num_cached_tokens", "num_rows", "target_token_ids", "support_lens", "target_probs", "tail_mass", "has_logprobs", "logprobs", "ahead_ids", "continuations", "num_arrived_bytes", "next")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    BASE_LENS_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    TARGET_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SUPPORT_LENS_FIELD_NUMBER: _ClassVar[int]
    TARGET_PROBS_FIELD_NUMBER: _ClassVar[int]
    TAIL_MASS_FIELD_NUMBER: _ClassVar[int]
    HAS_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    AHEAD_IDS_FIELD_NUMBER: _ClassVar[int]
    CONTINUATIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_ARRIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    load: _common_pb2.Load
    errors: _containers.RepeatedCompositeFieldContainer[_common_pb2.SequenceError]
    sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    request_ids: _containers.RepeatedScalarFieldContainer[int]
    base_lens: _containers.RepeatedScalarFieldContainer[int]
    timings: _common_pb2.Timings
    num_cached_tokens: _containers.RepeatedScalarFieldContainer[int]
    num_rows: _containers.RepeatedScalarFieldContainer[int]
    target_token_ids: bytes
    support_lens: bytes
    target_probs: bytes
    tail_mass: bytes
    has_logprobs: _containers.RepeatedScalarFieldContainer[bool]
    logprobs: _containers.RepeatedCompositeFieldContainer[PositionLogprobs]
    ahead_ids: _containers.RepeatedScalarFieldContainer[int]
    continuations: Continuations
    num_arrived_bytes: int
    next: _common_pb2.Proposals
    def __init__(self, incarnation: _Optional[str] = ..., load: _Optional[_Union[_common_pb2.Load, _Mapping]] = ..., errors: _Optional[_Iterable[_Union[_common_pb2.SequenceError, _Mapping]]] = ..., sequence_ids: _Optional[_Iterable[int]] = ..., request_ids: _Optional[_Iterable[int]] = ..., base_lens: _Optional[_Iterable[int]] = ..., timings: _Optional[_Union[_common_pb2.Timings, _Mapping]] = ..., num_cached_tokens: _Optional[_Iterable[int]] = ..., num_rows: _Optional[_Iterable[int]] = ..., target_token_ids: _Optional[bytes] = ..., support_lens: _Optional[bytes] = ..., target_probs: _Optional[bytes] = ..., tail_mass: _Optional[bytes] = ..., has_logprobs: _Optional[_Iterable[bool]] = ..., logprobs: _Optional[_Iterable[_Union[PositionLogprobs, _Mapping]]] = ..., ahead_ids: _Optional[_Iterable[int]] = ..., continuations: _Optional[_Union[Continuations, _Mapping]] = ..., num_arrived_bytes: _Optional[int] = ..., next: _Optional[_Union[_common_pb2.Proposals, _Mapping]] = ...) -> None: ...

class Continuations(_message.Message):
    __slots__ = ("ahead_ids", "num_accepted", "path", "next_token_ids")
    AHEAD_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    NEXT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ahead_ids: _containers.RepeatedScalarFieldContainer[int]
    num_accepted: _containers.RepeatedScalarFieldContainer[int]
    path: bytes
    next_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ahead_ids: _Optional[_Iterable[int]] = ..., num_accepted: _Optional[_Iterable[int]] = ..., path: _Optional[bytes] = ..., next_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class PositionLogprobs(_message.Message):
    __slots__ = ("token_ids", "values", "num_top")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    NUM_TOP_FIELD_NUMBER: _ClassVar[int]
    token_ids: bytes
    values: bytes
    num_top: int
    def __init__(self, token_ids: _Optional[bytes] = ..., values: _Optional[bytes] = ..., num_top: _Optional[int] = ...) -> None: ...

class VerifyServiceGetModelInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class VerifyServiceGetModelInfoResponse(_message.Message):
    __slots__ = ("model", "status")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    model: _common_pb2.ModelInfo
    status: _common_pb2.EngineStatus
    def __init__(self, model: _Optional[_Union[_common_pb2.ModelInfo, _Mapping]] = ..., status: _Optional[_Union[_common_pb2.EngineStatus, _Mapping]] = ...) -> None: ...

class VerifyServiceGetTokenizerRequest(_message.Message):
    __slots__ = ("offset",)
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    offset: int
    def __init__(self, offset: _Optional[int] = ...) -> None: ...

class VerifyServiceGetTokenizerResponse(_message.Message):
    __slots__ = ("page",)
    PAGE_FIELD_NUMBER: _ClassVar[int]
    page: bytes
    def __init__(self, page: _Optional[bytes] = ...) -> None: ...
