from specwire.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DraftRequest(_message.Message):
    __slots__ = ("open", "request_id", "base_len", "token_ids", "num_draft_tokens", "traceparent", "prepare", "max_depth")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    BASE_LEN_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    PREPARE_FIELD_NUMBER: _ClassVar[int]
    MAX_DEPTH_FIELD_NUMBER: _ClassVar[int]
    open: _common_pb2.OpenSequence
    request_id: int
    base_len: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_draft_tokens: int
    traceparent: str
    prepare: Preparation
    max_depth: int
    def __init__(self, open: _Optional[_Union[_common_pb2.OpenSequence, _Mapping]] = ..., request_id: _Optional[int] = ..., base_len: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., num_draft_tokens: _Optional[int] = ..., traceparent: _Optional[str] = ..., prepare: _Optional[_Union[Preparation, _Mapping]] = ..., max_depth: _Optional[int] = ...) -> None: ...

class Preparation(_message.Message):
    __slots__ = ("num_outcomes", "num_draft_tokens", "max_depth")
    NUM_OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_DEPTH_FIELD_NUMBER: _ClassVar[int]
    num_outcomes: int
    num_draft_tokens: int
    max_depth: int
    def __init__(self, num_outcomes: _Optional[int] = ..., num_draft_tokens: _Optional[int] = ..., max_depth: _Optional[int] = ...) -> None: ...

class DraftResponse(_message.Message):
    __slots__ = ("request_id", "base_len", "incarnation", "timings", "proposals", "num_cached_tokens", "begun_ahead", "last_request_id", "last_request_age_ns", "traceparent")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    BASE_LEN_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    PROPOSALS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BEGUN_AHEAD_FIELD_NUMBER: _ClassVar[int]
    LAST_REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    LAST_REQUEST_AGE_NS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    base_len: int
    incarnation: str
    timings: _common_pb2.Timings
    proposals: _containers.RepeatedCompositeFieldContainer[Proposal]
    num_cached_tokens: int
    begun_ahead: bool
    last_request_id: int
    last_request_age_ns: int
    traceparent: str
    def __init__(self, request_id: _Optional[int] = ..., base_len: _Optional[int] = ..., incarnation: _Optional[str] = ..., timings: _Optional[_Union[_common_pb2.Timings, _Mapping]] = ..., proposals: _Optional[_Iterable[_Union[Proposal, _Mapping]]] = ..., num_cached_tokens: _Optional[int] = ..., begun_ahead: _Optional[bool] = ..., last_request_id: _Optional[int] = ..., last_request_age_ns: _Optional[int] = ..., traceparent: _Optional[str] = ...) -> None: ...

class Proposal(_message.Message):
    __slots__ = ("token_ids", "parent_indices", "supports", "prefix_token_ids", "forward_ns")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PARENT_INDICES_FIELD_NUMBER: _ClassVar[int]
    SUPPORTS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FORWARD_NS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    parent_indices: _containers.RepeatedScalarFieldContainer[int]
    supports: _containers.RepeatedCompositeFieldContainer[Support]
    prefix_token_ids: _containers.RepeatedScalarFieldContainer[int]
    forward_ns: int
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., parent_indices: _Optional[_Iterable[int]] = ..., supports: _Optional[_Iterable[_Union[Support, _Mapping]]] = ..., prefix_token_ids: _Optional[_Iterable[int]] = ..., forward_ns: _Optional[int] = ...) -> None: ...

class Support(_message.Message):
    __slots__ = ("token_ids", "probs")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROBS_FIELD_NUMBER: _ClassVar[int]
    token_ids: bytes
    probs: bytes
    def __init__(self, token_ids: _Optional[bytes] = ..., probs: _Optional[bytes] = ...) -> None: ...

class DraftServiceGetModelInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DraftServiceGetModelInfoResponse(_message.Message):
    __slots__ = ("model", "status")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    model: _common_pb2.ModelInfo
    status: _common_pb2.EngineStatus
    def __init__(self, model: _Optional[_Union[_common_pb2.ModelInfo, _Mapping]] = ..., status: _Optional[_Union[_common_pb2.EngineStatus, _Mapping]] = ...) -> None: ...
