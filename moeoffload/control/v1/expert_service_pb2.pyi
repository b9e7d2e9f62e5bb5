from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DescribeRequest(_message.Message):
    __slots__ = ("model_digest", "compute_dtype")
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    model_digest: str
    compute_dtype: str
    def __init__(self, model_digest: _Optional[str] = ..., compute_dtype: _Optional[str] = ...) -> None: ...

class DescribeReply(_message.Message):
    __slots__ = ("protocol_version", "server_version", "device", "device_name", "offered_bytes", "resident_bytes", "batch_capacity", "transports", "max_slots", "draining", "model")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_NAME_FIELD_NUMBER: _ClassVar[int]
    OFFERED_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    BATCH_CAPACITY_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    MAX_SLOTS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    server_version: str
    device: str
    device_name: str
    offered_bytes: int
    resident_bytes: int
    batch_capacity: int
    transports: _containers.RepeatedScalarFieldContainer[str]
    max_slots: int
    draining: bool
    model: str
    def __init__(self, protocol_version: _Optional[int] = ..., server_version: _Optional[str] = ..., device: _Optional[str] = ..., device_name: _Optional[str] = ..., offered_bytes: _Optional[int] = ..., resident_bytes: _Optional[int] = ..., batch_capacity: _Optional[int] = ..., transports: _Optional[_Iterable[str]] = ..., max_slots: _Optional[int] = ..., draining: _Optional[bool] = ..., model: _Optional[str] = ...) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ("hello", "activate", "accept")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    ACTIVATE_FIELD_NUMBER: _ClassVar[int]
    ACCEPT_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    activate: Activate
    accept: Accept
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., activate: _Optional[_Union[Activate, _Mapping]] = ..., accept: _Optional[_Union[Accept, _Mapping]] = ...) -> None: ...

class AttachReply(_message.Message):
    __slots__ = ("welcome", "offer", "ready", "closing", "draining")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    OFFER_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    CLOSING_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    offer: Offer
    ready: Ready
    closing: Closing
    draining: Draining
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., offer: _Optional[_Union[Offer, _Mapping]] = ..., ready: _Optional[_Union[Ready, _Mapping]] = ..., closing: _Optional[_Union[Closing, _Mapping]] = ..., draining: _Optional[_Union[Draining, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol_version", "host_version", "host")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    HOST_VERSION_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    host_version: str
    host: str
    def __init__(self, protocol_version: _Optional[int] = ..., host_version: _Optional[str] = ..., host: _Optional[str] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("lease_id",)
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    def __init__(self, lease_id: _Optional[str] = ...) -> None: ...

class Activate(_message.Message):
    __slots__ = ("model_digest", "compute_dtype", "table_digest", "hidden_size", "top_k", "dtype_out", "dtype_back", "batch_capacity", "n_slots", "transport", "shared_bytes", "kernel", "stream_key")
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    TABLE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    DTYPE_OUT_FIELD_NUMBER: _ClassVar[int]
    DTYPE_BACK_FIELD_NUMBER: _ClassVar[int]
    BATCH_CAPACITY_FIELD_NUMBER: _ClassVar[int]
    N_SLOTS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    SHARED_BYTES_FIELD_NUMBER: _ClassVar[int]
    KERNEL_FIELD_NUMBER: _ClassVar[int]
    STREAM_KEY_FIELD_NUMBER: _ClassVar[int]
    model_digest: str
    compute_dtype: str
    table_digest: str
    hidden_size: int
    top_k: int
    dtype_out: str
    dtype_back: str
    batch_capacity: int
    n_slots: int
    transport: str
    shared_bytes: int
    kernel: str
    stream_key: str
    def __init__(self, model_digest: _Optional[str] = ..., compute_dtype: _Optional[str] = ..., table_digest: _Optional[str] = ..., hidden_size: _Optional[int] = ..., top_k: _Optional[int] = ..., dtype_out: _Optional[str] = ..., dtype_back: _Optional[str] = ..., batch_capacity: _Optional[int] = ..., n_slots: _Optional[int] = ..., transport: _Optional[str] = ..., shared_bytes: _Optional[int] = ..., kernel: _Optional[str] = ..., stream_key: _Optional[str] = ...) -> None: ...

class Offer(_message.Message):
    __slots__ = ("batch_capacity", "channels", "kernel", "timings")
    BATCH_CAPACITY_FIELD_NUMBER: _ClassVar[int]
    CHANNELS_FIELD_NUMBER: _ClassVar[int]
    KERNEL_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    batch_capacity: int
    channels: _containers.RepeatedCompositeFieldContainer[ChannelOffer]
    kernel: str
    timings: _containers.RepeatedCompositeFieldContainer[Timing]
    def __init__(self, batch_capacity: _Optional[int] = ..., channels: _Optional[_Iterable[_Union[ChannelOffer, _Mapping]]] = ..., kernel: _Optional[str] = ..., timings: _Optional[_Iterable[_Union[Timing, _Mapping]]] = ...) -> None: ...

class ChannelOffer(_message.Message):
    __slots__ = ("transport", "n_slots", "request_bytes", "reply_bytes", "parameters")
    class ParametersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    N_SLOTS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_BYTES_FIELD_NUMBER: _ClassVar[int]
    REPLY_BYTES_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    transport: str
    n_slots: int
    request_bytes: int
    reply_bytes: int
    parameters: _containers.ScalarMap[str, str]
    def __init__(self, transport: _Optional[str] = ..., n_slots: _Optional[int] = ..., request_bytes: _Optional[int] = ..., reply_bytes: _Optional[int] = ..., parameters: _Optional[_Mapping[str, str]] = ...) -> None: ...

class Accept(_message.Message):
    __slots__ = ("transport", "nonce", "reason")
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    transport: str
    nonce: bytes
    reason: str
    def __init__(self, transport: _Optional[str] = ..., nonce: _Optional[bytes] = ..., reason: _Optional[str] = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    def __init__(self, epoch: _Optional[int] = ...) -> None: ...

class Draining(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Closing(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class ModelReference(_message.Message):
    __slots__ = ("reference", "revision", "digest", "compute_dtype", "expert_format", "config")
    REFERENCE_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    EXPERT_FORMAT_FIELD_NUMBER: _ClassVar[int]
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    reference: str
    revision: str
    digest: str
    compute_dtype: str
    expert_format: str
    config: str
    def __init__(self, reference: _Optional[str] = ..., revision: _Optional[str] = ..., digest: _Optional[str] = ..., compute_dtype: _Optional[str] = ..., expert_format: _Optional[str] = ..., config: _Optional[str] = ...) -> None: ...

class CalibrateRequest(_message.Message):
    __slots__ = ("lease_id", "model")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    model: ModelReference
    def __init__(self, lease_id: _Optional[str] = ..., model: _Optional[_Union[ModelReference, _Mapping]] = ...) -> None: ...

class CalibrateReply(_message.Message):
    __slots__ = ("timings",)
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    timings: _containers.RepeatedCompositeFieldContainer[Timing]
    def __init__(self, timings: _Optional[_Iterable[_Union[Timing, _Mapping]]] = ...) -> None: ...

class Timing(_message.Message):
    __slots__ = ("rows", "seconds")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    rows: int
    seconds: float
    def __init__(self, rows: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class LayerExperts(_message.Message):
    __slots__ = ("layer", "experts")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    layer: int
    experts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, layer: _Optional[int] = ..., experts: _Optional[_Iterable[int]] = ...) -> None: ...

class LoadExpertsRequest(_message.Message):
    __slots__ = ("lease_id", "model", "layers")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    model: ModelReference
    layers: _containers.RepeatedCompositeFieldContainer[LayerExperts]
    def __init__(self, lease_id: _Optional[str] = ..., model: _Optional[_Union[ModelReference, _Mapping]] = ..., layers: _Optional[_Iterable[_Union[LayerExperts, _Mapping]]] = ...) -> None: ...

class LoadProgress(_message.Message):
    __slots__ = ("loaded_bytes", "total_bytes", "table_digest", "weight_error")
    LOADED_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    TABLE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_ERROR_FIELD_NUMBER: _ClassVar[int]
    loaded_bytes: int
    total_bytes: int
    table_digest: str
    weight_error: float
    def __init__(self, loaded_bytes: _Optional[int] = ..., total_bytes: _Optional[int] = ..., table_digest: _Optional[str] = ..., weight_error: _Optional[float] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainReply(_message.Message):
    __slots__ = ("leases",)
    LEASES_FIELD_NUMBER: _ClassVar[int]
    leases: int
    def __init__(self, leases: _Optional[int] = ...) -> None: ...

class StatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatsReply(_message.Message):
    __slots__ = ("requests", "rows", "errors", "queue_seconds", "compute_seconds", "resident_bytes", "leases", "pool_creations", "dropped", "batches", "warm_bytes", "read_bytes", "tiers", "memory", "refused")
    class PoolCreationsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    POOL_CREATIONS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    WARM_BYTES_FIELD_NUMBER: _ClassVar[int]
    READ_BYTES_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    requests: int
    rows: int
    errors: int
    queue_seconds: float
    compute_seconds: float
    resident_bytes: int
    leases: int
    pool_creations: _containers.ScalarMap[str, int]
    dropped: int
    batches: BatchStats
    warm_bytes: int
    read_bytes: int
    tiers: TierStats
    memory: DeviceMemory
    refused: int
    def __init__(self, requests: _Optional[int] = ..., rows: _Optional[int] = ..., errors: _Optional[int] = ..., queue_seconds: _Optional[float] = ..., compute_seconds: _Optional[float] = ..., resident_bytes: _Optional[int] = ..., leases: _Optional[int] = ..., pool_creations: _Optional[_Mapping[str, int]] = ..., dropped: _Optional[int] = ..., batches: _Optional[_Union[BatchStats, _Mapping]] = ..., warm_bytes: _Optional[int] = ..., read_bytes: _Optional[int] = ..., tiers: _Optional[_Union[TierStats, _Mapping]] = ..., memory: _Optional[_Union[DeviceMemory, _Mapping]] = ..., refused: _Optional[int] = ...) -> None: ...

class DeviceMemory(_message.Message):
    __slots__ = ("allocated_bytes", "reserved_bytes", "total_bytes")
    ALLOCATED_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESERVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    allocated_bytes: int
    reserved_bytes: int
    total_bytes: int
    def __init__(self, allocated_bytes: _Optional[int] = ..., reserved_bytes: _Optional[int] = ..., total_bytes: _Optional[int] = ...) -> None: ...

class TierStats(_message.Message):
    __slots__ = ("fast_bytes", "fast_routes", "slow_routes", "moves")
    FAST_BYTES_FIELD_NUMBER: _ClassVar[int]
    FAST_ROUTES_FIELD_NUMBER: _ClassVar[int]
    SLOW_ROUTES_FIELD_NUMBER: _ClassVar[int]
    MOVES_FIELD_NUMBER: _ClassVar[int]
    fast_bytes: int
    fast_routes: int
    slow_routes: int
    moves: int
    def __init__(self, fast_bytes: _Optional[int] = ..., fast_routes: _Optional[int] = ..., slow_routes: _Optional[int] = ..., moves: _Optional[int] = ...) -> None: ...

class BatchStats(_message.Message):
    __slots__ = ("batches", "by_members", "wait_seconds")
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    BY_MEMBERS_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    batches: int
    by_members: _containers.RepeatedScalarFieldContainer[int]
    wait_seconds: float
    def __init__(self, batches: _Optional[int] = ..., by_members: _Optional[_Iterable[int]] = ..., wait_seconds: _Optional[float] = ...) -> None: ...
