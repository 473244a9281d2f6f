from specwire.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class VerifyRequest(_message.Message):
    __slots__ = ("open", "request_id", "base_len", "token_ids", "draft_token_ids", "parent_indices", "support_token_ids", "traceparent")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    BASE_LEN_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PARENT_INDICES_FIELD_NUMBER: _ClassVar[int]
    SUPPORT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    open: _common_pb2.OpenSequence
    request_id: int
    base_len: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    draft_token_ids: _containers.RepeatedScalarFieldContainer[int]
    parent_indices: _containers.RepeatedScalarFieldContainer[int]
    support_token_ids: _containers.RepeatedScalarFieldContainer[bytes]
    traceparent: str
    def __init__(self, open: _Optional[_Union[_common_pb2.OpenSequence, _Mapping]] = ..., request_id: _Optional[int] = ..., base_len: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., draft_token_ids: _Optional[_Iterable[int]] = ..., parent_indices: _Optional[_Iterable[int]] = ..., support_token_ids: _Optional[_Iterable[bytes]] = ..., traceparent: _Optional[str] = ...) -> None: ...

class VerifyResponse(_message.Message):
    __slots__ = ("request_id", "base_len", "incarnation", "timings", "target_token_ids", "target_probs", "tail_mass", "logprobs", "num_cached_tokens", "load")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    BASE_LEN_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    TARGET_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TARGET_PROBS_FIELD_NUMBER: _ClassVar[int]
    TAIL_MASS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    base_len: int
    incarnation: str
    timings: _common_pb2.Timings
    target_token_ids: _containers.RepeatedScalarFieldContainer[int]
    target_probs: _containers.RepeatedScalarFieldContainer[bytes]
    tail_mass: _containers.RepeatedScalarFieldContainer[float]
    logprobs: _containers.RepeatedCompositeFieldContainer[PositionLogprobs]
    num_cached_tokens: int
    load: _common_pb2.Load
    def __init__(self, request_id: _Optional[int] = ..., base_len: _Optional[int] = ..., incarnation: _Optional[str] = ..., timings: _Optional[_Union[_common_pb2.Timings, _Mapping]] = ..., target_token_ids: _Optional[_Iterable[int]] = ..., target_probs: _Optional[_Iterable[bytes]] = ..., tail_mass: _Optional[_Iterable[float]] = ..., logprobs: _Optional[_Iterable[_Union[PositionLogprobs, _Mapping]]] = ..., num_cached_tokens: _Optional[int] = ..., load: _Optional[_Union[_common_pb2.Load, _Mapping]] = ...) -> None: ...

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
