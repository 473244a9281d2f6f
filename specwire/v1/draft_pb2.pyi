from specwire.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DraftRequest(_message.Message):
    __slots__ = ("open", "close", "sequence_ids", "request_ids", "base_lens", "num_tokens", "token_ids", "num_draft_tokens", "max_depths", "prepare", "traceparents", "num_arrived_bytes", "num_chains")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    BASE_LENS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_DEPTHS_FIELD_NUMBER: _ClassVar[int]
    PREPARE_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENTS_FIELD_NUMBER: _ClassVar[int]
    NUM_ARRIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_CHAINS_FIELD_NUMBER: _ClassVar[int]
    open: _containers.RepeatedCompositeFieldContainer[_common_pb2.OpenSequence]
    close: _containers.RepeatedScalarFieldContainer[int]
    sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    request_ids: _containers.RepeatedScalarFieldContainer[int]
    base_lens: _containers.RepeatedScalarFieldContainer[int]
    num_tokens: _containers.RepeatedScalarFieldContainer[int]
    token_ids: bytes
    num_draft_tokens: _containers.RepeatedScalarFieldContainer[int]
    max_depths: _containers.RepeatedScalarFieldContainer[int]
    prepare: Preparations
    traceparents: _containers.RepeatedScalarFieldContainer[str]
    num_arrived_bytes: int
    num_chains: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, open: _Optional[_Iterable[_Union[_common_pb2.OpenSequence, _Mapping]]] = ..., close: _Optional[_Iterable[int]] = ..., sequence_ids: _Optional[_Iterable[int]] = ..., request_ids: _Optional[_Iterable[int]] = ..., base_lens: _Optional[_Iterable[int]] = ..., num_tokens: _Optional[_Iterable[int]] = ..., token_ids: _Optional[bytes] = ..., num_draft_tokens: _Optional[_Iterable[int]] = ..., max_depths: _Optional[_Iterable[int]] = ..., prepare: _Optional[_Union[Preparations, _Mapping]] = ..., traceparents: _Optional[_Iterable[str]] = ..., num_arrived_bytes: _Optional[int] = ..., num_chains: _Optional[_Iterable[int]] = ...) -> None: ...

class Preparations(_message.Message):
    __slots__ = ("num_outcomes", "num_draft_tokens", "max_depths")
    NUM_OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_DEPTHS_FIELD_NUMBER: _ClassVar[int]
    num_outcomes: _containers.RepeatedScalarFieldContainer[int]
    num_draft_tokens: _containers.RepeatedScalarFieldContainer[int]
    max_depths: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, num_outcomes: _Optional[_Iterable[int]] = ..., num_draft_tokens: _Optional[_Iterable[int]] = ..., max_depths: _Optional[_Iterable[int]] = ...) -> None: ...

class DraftResponse(_message.Message):
    __slots__ = ("incarnation", "errors", "sequence_ids", "request_ids", "base_lens", "timings", "num_cached_tokens", "begun_ahead", "proposals", "prepared")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    BASE_LENS_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BEGUN_AHEAD_FIELD_NUMBER: _ClassVar[int]
    PROPOSALS_FIELD_NUMBER: _ClassVar[int]
    PREPARED_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    errors: _containers.RepeatedCompositeFieldContainer[_common_pb2.SequenceError]
    sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    request_ids: _containers.RepeatedScalarFieldContainer[int]
    base_lens: _containers.RepeatedScalarFieldContainer[int]
    timings: _common_pb2.Timings
    num_cached_tokens: _containers.RepeatedScalarFieldContainer[int]
    begun_ahead: _containers.RepeatedScalarFieldContainer[bool]
    proposals: _common_pb2.Proposals
    prepared: PreparedProposals
    def __init__(self, incarnation: _Optional[str] = ..., errors: _Optional[_Iterable[_Union[_common_pb2.SequenceError, _Mapping]]] = ..., sequence_ids: _Optional[_Iterable[int]] = ..., request_ids: _Optional[_Iterable[int]] = ..., base_lens: _Optional[_Iterable[int]] = ..., timings: _Optional[_Union[_common_pb2.Timings, _Mapping]] = ..., num_cached_tokens: _Optional[_Iterable[int]] = ..., begun_ahead: _Optional[_Iterable[bool]] = ..., proposals: _Optional[_Union[_common_pb2.Proposals, _Mapping]] = ..., prepared: _Optional[_Union[PreparedProposals, _Mapping]] = ...) -> None: ...

class PreparedProposals(_message.Message):
    __slots__ = ("sequence_ids", "base_lens", "last_request_ids", "last_request_age_ns", "forward_ns", "path_lens", "path_token_ids", "traceparents", "proposals")
    SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    BASE_LENS_FIELD_NUMBER: _ClassVar[int]
    LAST_REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    LAST_REQUEST_AGE_NS_FIELD_NUMBER: _ClassVar[int]
    FORWARD_NS_FIELD_NUMBER: _ClassVar[int]
    PATH_LENS_FIELD_NUMBER: _ClassVar[int]
    PATH_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENTS_FIELD_NUMBER: _ClassVar[int]
    PROPOSALS_FIELD_NUMBER: _ClassVar[int]
    sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    base_lens: _containers.RepeatedScalarFieldContainer[int]
    last_request_ids: _containers.RepeatedScalarFieldContainer[int]
    last_request_age_ns: _containers.RepeatedScalarFieldContainer[int]
    forward_ns: _containers.RepeatedScalarFieldContainer[int]
    path_lens: _containers.RepeatedScalarFieldContainer[int]
    path_token_ids: bytes
    traceparents: _containers.RepeatedScalarFieldContainer[str]
    proposals: _common_pb2.Proposals
    def __init__(self, sequence_ids: _Optional[_Iterable[int]] = ..., base_lens: _Optional[_Iterable[int]] = ..., last_request_ids: _Optional[_Iterable[int]] = ..., last_request_age_ns: _Optional[_Iterable[int]] = ..., forward_ns: _Optional[_Iterable[int]] = ..., path_lens: _Optional[_Iterable[int]] = ..., path_token_ids: _Optional[bytes] = ..., traceparents: _Optional[_Iterable[str]] = ..., proposals: _Optional[_Union[_common_pb2.Proposals, _Mapping]] = ...) -> None: ...

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
