from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EnrolRequest(_message.Message):
    __slots__ = ("csr",)
    CSR_FIELD_NUMBER: _ClassVar[int]
    csr: bytes
    def __init__(self, csr: _Optional[bytes] = ...) -> None: ...

class EnrolReply(_message.Message):
    __slots__ = ("certificate",)
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    certificate: bytes
    def __init__(self, certificate: _Optional[bytes] = ...) -> None: ...

class SiteMessage(_message.Message):
    __slots__ = ("hello", "load", "accepted", "rejected", "step", "bid", "released", "pong", "draining", "bye", "bunch", "counted", "prefixes", "models", "ordered", "held", "training")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    BID_FIELD_NUMBER: _ClassVar[int]
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    PONG_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    BYE_FIELD_NUMBER: _ClassVar[int]
    BUNCH_FIELD_NUMBER: _ClassVar[int]
    COUNTED_FIELD_NUMBER: _ClassVar[int]
    PREFIXES_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    ORDERED_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    TRAINING_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    load: Load
    accepted: Accepted
    rejected: Rejected
    step: Step
    bid: Bid
    released: Released
    pong: Pong
    draining: Draining
    bye: Bye
    bunch: SiteBunch
    counted: Counted
    prefixes: Prefixes
    models: Models
    ordered: Ordered
    held: Held
    training: Training
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., accepted: _Optional[_Union[Accepted, _Mapping]] = ..., rejected: _Optional[_Union[Rejected, _Mapping]] = ..., step: _Optional[_Union[Step, _Mapping]] = ..., bid: _Optional[_Union[Bid, _Mapping]] = ..., released: _Optional[_Union[Released, _Mapping]] = ..., pong: _Optional[_Union[Pong, _Mapping]] = ..., draining: _Optional[_Union[Draining, _Mapping]] = ..., bye: _Optional[_Union[Bye, _Mapping]] = ..., bunch: _Optional[_Union[SiteBunch, _Mapping]] = ..., counted: _Optional[_Union[Counted, _Mapping]] = ..., prefixes: _Optional[_Union[Prefixes, _Mapping]] = ..., models: _Optional[_Union[Models, _Mapping]] = ..., ordered: _Optional[_Union[Ordered, _Mapping]] = ..., held: _Optional[_Union[Held, _Mapping]] = ..., training: _Optional[_Union[Training, _Mapping]] = ...) -> None: ...

class GatewayMessage(_message.Message):
    __slots__ = ("welcome", "assign", "cancel", "release", "ping", "bunch", "count", "order", "train", "stop_training", "report_pace")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    ASSIGN_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    BUNCH_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    TRAIN_FIELD_NUMBER: _ClassVar[int]
    STOP_TRAINING_FIELD_NUMBER: _ClassVar[int]
    REPORT_PACE_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    assign: Assign
    cancel: Cancel
    release: Release
    ping: Ping
    bunch: GatewayBunch
    count: Count
    order: ModelOrder
    train: Train
    stop_training: StopTraining
    report_pace: ReportPace
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., assign: _Optional[_Union[Assign, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., release: _Optional[_Union[Release, _Mapping]] = ..., ping: _Optional[_Union[Ping, _Mapping]] = ..., bunch: _Optional[_Union[GatewayBunch, _Mapping]] = ..., count: _Optional[_Union[Count, _Mapping]] = ..., order: _Optional[_Union[ModelOrder, _Mapping]] = ..., train: _Optional[_Union[Train, _Mapping]] = ..., stop_training: _Optional[_Union[StopTraining, _Mapping]] = ..., report_pace: _Optional[_Union[ReportPace, _Mapping]] = ...) -> None: ...

class SiteBunch(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[SiteMessage]
    def __init__(self, messages: _Optional[_Iterable[_Union[SiteMessage, _Mapping]]] = ...) -> None: ...

class GatewayBunch(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[GatewayMessage]
    def __init__(self, messages: _Optional[_Iterable[_Union[GatewayMessage, _Mapping]]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol", "site", "boot_id", "cloud", "region", "models", "slots", "kv_capacity_tokens", "input_usd_per_mtok", "output_usd_per_mtok", "engine", "version", "reads_bunches", "takes_orders", "paces_reports", "trains", "pool", "cached_usd_per_mtok", "usd_per_hour", "highest_protocol", "attempts")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    SITE_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    CLOUD_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    KV_CAPACITY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    INPUT_USD_PER_MTOK_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_USD_PER_MTOK_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    READS_BUNCHES_FIELD_NUMBER: _ClassVar[int]
    TAKES_ORDERS_FIELD_NUMBER: _ClassVar[int]
    PACES_REPORTS_FIELD_NUMBER: _ClassVar[int]
    TRAINS_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    CACHED_USD_PER_MTOK_FIELD_NUMBER: _ClassVar[int]
    USD_PER_HOUR_FIELD_NUMBER: _ClassVar[int]
    HIGHEST_PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    site: str
    boot_id: str
    cloud: str
    region: str
    models: _containers.RepeatedCompositeFieldContainer[Model]
    slots: int
    kv_capacity_tokens: int
    input_usd_per_mtok: float
    output_usd_per_mtok: float
    engine: str
    version: str
    reads_bunches: bool
    takes_orders: bool
    paces_reports: bool
    trains: Trains
    pool: str
    cached_usd_per_mtok: float
    usd_per_hour: float
    highest_protocol: int
    attempts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, protocol: _Optional[int] = ..., site: _Optional[str] = ..., boot_id: _Optional[str] = ..., cloud: _Optional[str] = ..., region: _Optional[str] = ..., models: _Optional[_Iterable[_Union[Model, _Mapping]]] = ..., slots: _Optional[int] = ..., kv_capacity_tokens: _Optional[int] = ..., input_usd_per_mtok: _Optional[float] = ..., output_usd_per_mtok: _Optional[float] = ..., engine: _Optional[str] = ..., version: _Optional[str] = ..., reads_bunches: _Optional[bool] = ..., takes_orders: _Optional[bool] = ..., paces_reports: _Optional[bool] = ..., trains: _Optional[_Union[Trains, _Mapping]] = ..., pool: _Optional[str] = ..., cached_usd_per_mtok: _Optional[float] = ..., usd_per_hour: _Optional[float] = ..., highest_protocol: _Optional[int] = ..., attempts: _Optional[_Iterable[str]] = ...) -> None: ...

class Model(_message.Message):
    __slots__ = ("id", "revision", "context_tokens", "created_s", "owned_by", "features", "max_token_chars", "parent", "own_bytes", "state", "wake_s", "tenant", "blocks")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        READY: _ClassVar[Model.State]
        SLEEPING: _ClassVar[Model.State]
        WAKING: _ClassVar[Model.State]
    READY: Model.State
    SLEEPING: Model.State
    WAKING: Model.State
    ID_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CREATED_S_FIELD_NUMBER: _ClassVar[int]
    OWNED_BY_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKEN_CHARS_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    OWN_BYTES_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    WAKE_S_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    id: str
    revision: str
    context_tokens: int
    created_s: int
    owned_by: str
    features: _containers.RepeatedScalarFieldContainer[str]
    max_token_chars: int
    parent: str
    own_bytes: int
    state: Model.State
    wake_s: float
    tenant: str
    blocks: _containers.RepeatedCompositeFieldContainer[Block]
    def __init__(self, id: _Optional[str] = ..., revision: _Optional[str] = ..., context_tokens: _Optional[int] = ..., created_s: _Optional[int] = ..., owned_by: _Optional[str] = ..., features: _Optional[_Iterable[str]] = ..., max_token_chars: _Optional[int] = ..., parent: _Optional[str] = ..., own_bytes: _Optional[int] = ..., state: _Optional[_Union[Model.State, str]] = ..., wake_s: _Optional[float] = ..., tenant: _Optional[str] = ..., blocks: _Optional[_Iterable[_Union[Block, _Mapping]]] = ...) -> None: ...

class Block(_message.Message):
    __slots__ = ("id", "kind", "first", "last", "bytes", "in_host")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        OTHER: _ClassVar[Block.Kind]
        BASE: _ClassVar[Block.Kind]
        SLOTS: _ClassVar[Block.Kind]
        EMBEDDING: _ClassVar[Block.Kind]
        LAYERS: _ClassVar[Block.Kind]
        HEAD: _ClassVar[Block.Kind]
        ADAPTER: _ClassVar[Block.Kind]
    OTHER: Block.Kind
    BASE: Block.Kind
    SLOTS: Block.Kind
    EMBEDDING: Block.Kind
    LAYERS: Block.Kind
    HEAD: Block.Kind
    ADAPTER: Block.Kind
    ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    IN_HOST_FIELD_NUMBER: _ClassVar[int]
    id: bytes
    kind: Block.Kind
    first: int
    last: int
    bytes: int
    in_host: bool
    def __init__(self, id: _Optional[bytes] = ..., kind: _Optional[_Union[Block.Kind, str]] = ..., first: _Optional[int] = ..., last: _Optional[int] = ..., bytes: _Optional[int] = ..., in_host: _Optional[bool] = ...) -> None: ...

class Models(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[Model]
    def __init__(self, models: _Optional[_Iterable[_Union[Model, _Mapping]]] = ...) -> None: ...

class ModelOrder(_message.Message):
    __slots__ = ("order_id", "kind", "model", "adapter", "folder", "content", "tenant", "parent")
    ORDER_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    order_id: str
    kind: str
    model: str
    adapter: str
    folder: str
    content: Content
    tenant: str
    parent: str
    def __init__(self, order_id: _Optional[str] = ..., kind: _Optional[str] = ..., model: _Optional[str] = ..., adapter: _Optional[str] = ..., folder: _Optional[str] = ..., content: _Optional[_Union[Content, _Mapping]] = ..., tenant: _Optional[str] = ..., parent: _Optional[str] = ...) -> None: ...

class Held(_message.Message):
    __slots__ = ("attempt_id",)
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    attempt_id: str
    def __init__(self, attempt_id: _Optional[str] = ...) -> None: ...

class Ordered(_message.Message):
    __slots__ = ("order_id", "error")
    ORDER_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    order_id: str
    error: str
    def __init__(self, order_id: _Optional[str] = ..., error: _Optional[str] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("seq", "running", "pending", "token_load", "kv_free_tokens", "kv_reserved_tokens", "tokens_per_s", "seconds_per_iteration", "iteration", "running_remaining", "running_weight", "pending_prompt_tokens", "pending_response_tokens", "tokens_total", "prompt_tokens_total", "unread_tokens", "stalled_s", "unknown_messages", "longest_iteration_s", "devices", "training", "training_s_per_iteration", "kv_extra_tokens", "computed_tokens_total")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    TOKEN_LOAD_FIELD_NUMBER: _ClassVar[int]
    KV_FREE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_RESERVED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    SECONDS_PER_ITERATION_FIELD_NUMBER: _ClassVar[int]
    ITERATION_FIELD_NUMBER: _ClassVar[int]
    RUNNING_REMAINING_FIELD_NUMBER: _ClassVar[int]
    RUNNING_WEIGHT_FIELD_NUMBER: _ClassVar[int]
    PENDING_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PENDING_RESPONSE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    UNREAD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STALLED_S_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    LONGEST_ITERATION_S_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    TRAINING_FIELD_NUMBER: _ClassVar[int]
    TRAINING_S_PER_ITERATION_FIELD_NUMBER: _ClassVar[int]
    KV_EXTRA_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    seq: int
    running: int
    pending: int
    token_load: float
    kv_free_tokens: int
    kv_reserved_tokens: int
    tokens_per_s: float
    seconds_per_iteration: float
    iteration: IterationCost
    running_remaining: _containers.RepeatedScalarFieldContainer[int]
    running_weight: int
    pending_prompt_tokens: int
    pending_response_tokens: float
    tokens_total: int
    prompt_tokens_total: int
    unread_tokens: int
    stalled_s: float
    unknown_messages: int
    longest_iteration_s: float
    devices: _containers.RepeatedCompositeFieldContainer[DeviceLoad]
    training: int
    training_s_per_iteration: float
    kv_extra_tokens: int
    computed_tokens_total: int
    def __init__(self, seq: _Optional[int] = ..., running: _Optional[int] = ..., pending: _Optional[int] = ..., token_load: _Optional[float] = ..., kv_free_tokens: _Optional[int] = ..., kv_reserved_tokens: _Optional[int] = ..., tokens_per_s: _Optional[float] = ..., seconds_per_iteration: _Optional[float] = ..., iteration: _Optional[_Union[IterationCost, _Mapping]] = ..., running_remaining: _Optional[_Iterable[int]] = ..., running_weight: _Optional[int] = ..., pending_prompt_tokens: _Optional[int] = ..., pending_response_tokens: _Optional[float] = ..., tokens_total: _Optional[int] = ..., prompt_tokens_total: _Optional[int] = ..., unread_tokens: _Optional[int] = ..., stalled_s: _Optional[float] = ..., unknown_messages: _Optional[int] = ..., longest_iteration_s: _Optional[float] = ..., devices: _Optional[_Iterable[_Union[DeviceLoad, _Mapping]]] = ..., training: _Optional[int] = ..., training_s_per_iteration: _Optional[float] = ..., kv_extra_tokens: _Optional[int] = ..., computed_tokens_total: _Optional[int] = ...) -> None: ...

class DeviceLoad(_message.Message):
    __slots__ = ("device", "lost", "slots", "running", "pending", "kv_tokens", "kv_free_tokens", "tokens_per_s", "moved_in", "losses")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_FREE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    MOVED_IN_FIELD_NUMBER: _ClassVar[int]
    LOSSES_FIELD_NUMBER: _ClassVar[int]
    device: str
    lost: bool
    slots: int
    running: int
    pending: int
    kv_tokens: int
    kv_free_tokens: int
    tokens_per_s: float
    moved_in: int
    losses: int
    def __init__(self, device: _Optional[str] = ..., lost: _Optional[bool] = ..., slots: _Optional[int] = ..., running: _Optional[int] = ..., pending: _Optional[int] = ..., kv_tokens: _Optional[int] = ..., kv_free_tokens: _Optional[int] = ..., tokens_per_s: _Optional[float] = ..., moved_in: _Optional[int] = ..., losses: _Optional[int] = ...) -> None: ...

class ReportPace(_message.Message):
    __slots__ = ("times_off", "every_s", "heartbeat_s")
    TIMES_OFF_FIELD_NUMBER: _ClassVar[int]
    EVERY_S_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_S_FIELD_NUMBER: _ClassVar[int]
    times_off: int
    every_s: int
    heartbeat_s: float
    def __init__(self, times_off: _Optional[int] = ..., every_s: _Optional[int] = ..., heartbeat_s: _Optional[float] = ...) -> None: ...

class IterationCost(_message.Message):
    __slots__ = ("base_s", "per_row_s", "per_token_s", "per_kv_token_s")
    BASE_S_FIELD_NUMBER: _ClassVar[int]
    PER_ROW_S_FIELD_NUMBER: _ClassVar[int]
    PER_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    PER_KV_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    base_s: float
    per_row_s: float
    per_token_s: float
    per_kv_token_s: float
    def __init__(self, base_s: _Optional[float] = ..., per_row_s: _Optional[float] = ..., per_token_s: _Optional[float] = ..., per_kv_token_s: _Optional[float] = ...) -> None: ...

class Assign(_message.Message):
    __slots__ = ("attempt_id", "query_id", "model", "chat", "text", "token_ids", "pooling", "sampling", "forecast", "lane", "priority", "deadline_s", "tenant", "resume", "traceparent", "request_id", "image_tokens", "prefix_hashes", "any_order", "prefill_heavy")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    QUERY_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    FORECAST_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    IMAGE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HASHES_FIELD_NUMBER: _ClassVar[int]
    ANY_ORDER_FIELD_NUMBER: _ClassVar[int]
    PREFILL_HEAVY_FIELD_NUMBER: _ClassVar[int]
    attempt_id: str
    query_id: str
    model: str
    chat: Chat
    text: str
    token_ids: TokenIds
    pooling: Pooling
    sampling: Sampling
    forecast: Forecast
    lane: int
    priority: int
    deadline_s: float
    tenant: str
    resume: ResumeFrom
    traceparent: str
    request_id: str
    image_tokens: int
    prefix_hashes: bytes
    any_order: bool
    prefill_heavy: bool
    def __init__(self, attempt_id: _Optional[str] = ..., query_id: _Optional[str] = ..., model: _Optional[str] = ..., chat: _Optional[_Union[Chat, _Mapping]] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., pooling: _Optional[_Union[Pooling, _Mapping]] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., forecast: _Optional[_Union[Forecast, _Mapping]] = ..., lane: _Optional[int] = ..., priority: _Optional[int] = ..., deadline_s: _Optional[float] = ..., tenant: _Optional[str] = ..., resume: _Optional[_Union[ResumeFrom, _Mapping]] = ..., traceparent: _Optional[str] = ..., request_id: _Optional[str] = ..., image_tokens: _Optional[int] = ..., prefix_hashes: _Optional[bytes] = ..., any_order: _Optional[bool] = ..., prefill_heavy: _Optional[bool] = ...) -> None: ...

class Chat(_message.Message):
    __slots__ = ("messages", "tools_json", "tool_choice", "tool_name", "single_tool_call", "template_kwargs_json", "reasoning_effort")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    TOOLS_JSON_FIELD_NUMBER: _ClassVar[int]
    TOOL_CHOICE_FIELD_NUMBER: _ClassVar[int]
    TOOL_NAME_FIELD_NUMBER: _ClassVar[int]
    SINGLE_TOOL_CALL_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_KWARGS_JSON_FIELD_NUMBER: _ClassVar[int]
    REASONING_EFFORT_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    tools_json: str
    tool_choice: str
    tool_name: str
    single_tool_call: bool
    template_kwargs_json: str
    reasoning_effort: str
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., tools_json: _Optional[str] = ..., tool_choice: _Optional[str] = ..., tool_name: _Optional[str] = ..., single_tool_call: _Optional[bool] = ..., template_kwargs_json: _Optional[str] = ..., reasoning_effort: _Optional[str] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content", "name", "tool_calls_json", "tool_call_id", "content_json", "reasoning")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_JSON_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_ID_FIELD_NUMBER: _ClassVar[int]
    CONTENT_JSON_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    name: str
    tool_calls_json: str
    tool_call_id: str
    content_json: str
    reasoning: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ..., name: _Optional[str] = ..., tool_calls_json: _Optional[str] = ..., tool_call_id: _Optional[str] = ..., content_json: _Optional[str] = ..., reasoning: _Optional[str] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Pooling(_message.Message):
    __slots__ = ("task", "body_json", "inputs", "tokens")
    TASK_FIELD_NUMBER: _ClassVar[int]
    BODY_JSON_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    task: str
    body_json: str
    inputs: int
    tokens: int
    def __init__(self, task: _Optional[str] = ..., body_json: _Optional[str] = ..., inputs: _Optional[int] = ..., tokens: _Optional[int] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("max_tokens", "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed", "stop", "stop_token_ids", "min_tokens", "ignore_eos", "logit_bias", "logprobs", "echo", "guided_json", "left_out")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ECHO_FIELD_NUMBER: _ClassVar[int]
    GUIDED_JSON_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    n: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    seed: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    min_tokens: int
    ignore_eos: bool
    logit_bias: _containers.ScalarMap[int, float]
    logprobs: int
    echo: bool
    guided_json: str
    left_out: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, max_tokens: _Optional[int] = ..., n: _Optional[int] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., seed: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., min_tokens: _Optional[int] = ..., ignore_eos: _Optional[bool] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., logprobs: _Optional[int] = ..., echo: _Optional[bool] = ..., guided_json: _Optional[str] = ..., left_out: _Optional[_Iterable[str]] = ...) -> None: ...

class Forecast(_message.Message):
    __slots__ = ("generated", "expected_remaining", "p90_remaining")
    GENERATED_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_REMAINING_FIELD_NUMBER: _ClassVar[int]
    P90_REMAINING_FIELD_NUMBER: _ClassVar[int]
    generated: _containers.RepeatedScalarFieldContainer[int]
    expected_remaining: _containers.RepeatedScalarFieldContainer[float]
    p90_remaining: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, generated: _Optional[_Iterable[int]] = ..., expected_remaining: _Optional[_Iterable[float]] = ..., p90_remaining: _Optional[_Iterable[int]] = ...) -> None: ...

class ResumeFrom(_message.Message):
    __slots__ = ("token_ids", "text_chars", "tool_calls", "argument_chars", "text", "tokens", "reasoning_chars")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_CHARS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    ARGUMENT_CHARS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    REASONING_CHARS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    text_chars: int
    tool_calls: int
    argument_chars: int
    text: str
    tokens: int
    reasoning_chars: int
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., text_chars: _Optional[int] = ..., tool_calls: _Optional[int] = ..., argument_chars: _Optional[int] = ..., text: _Optional[str] = ..., tokens: _Optional[int] = ..., reasoning_chars: _Optional[int] = ...) -> None: ...

class Accepted(_message.Message):
    __slots__ = ("attempt_id", "prompt_tokens")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    attempt_id: str
    prompt_tokens: int
    def __init__(self, attempt_id: _Optional[str] = ..., prompt_tokens: _Optional[int] = ...) -> None: ...

class Rejected(_message.Message):
    __slots__ = ("attempt_id", "reason", "message", "param")
    class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        REASON_UNSPECIFIED: _ClassVar[Rejected.Reason]
        FULL: _ClassVar[Rejected.Reason]
        DRAINING: _ClassVar[Rejected.Reason]
        MODEL_UNKNOWN: _ClassVar[Rejected.Reason]
        CONTEXT_LENGTH: _ClassVar[Rejected.Reason]
        INVALID: _ClassVar[Rejected.Reason]
        UNSUPPORTED: _ClassVar[Rejected.Reason]
        INTERNAL: _ClassVar[Rejected.Reason]
    REASON_UNSPECIFIED: Rejected.Reason
    FULL: Rejected.Reason
    DRAINING: Rejected.Reason
    MODEL_UNKNOWN: Rejected.Reason
    CONTEXT_LENGTH: Rejected.Reason
    INVALID: Rejected.Reason
    UNSUPPORTED: Rejected.Reason
    INTERNAL: Rejected.Reason
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    PARAM_FIELD_NUMBER: _ClassVar[int]
    attempt_id: str
    reason: Rejected.Reason
    message: str
    param: str
    def __init__(self, attempt_id: _Optional[str] = ..., reason: _Optional[_Union[Rejected.Reason, str]] = ..., message: _Optional[str] = ..., param: _Optional[str] = ...) -> None: ...

class Count(_message.Message):
    __slots__ = ("assign",)
    ASSIGN_FIELD_NUMBER: _ClassVar[int]
    assign: Assign
    def __init__(self, assign: _Optional[_Union[Assign, _Mapping]] = ...) -> None: ...

class Counted(_message.Message):
    __slots__ = ("attempt_id", "prompt_tokens")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    attempt_id: str
    prompt_tokens: int
    def __init__(self, attempt_id: _Optional[str] = ..., prompt_tokens: _Optional[int] = ...) -> None: ...

class Step(_message.Message):
    __slots__ = ("deltas",)
    DELTAS_FIELD_NUMBER: _ClassVar[int]
    deltas: _containers.RepeatedCompositeFieldContainer[Delta]
    def __init__(self, deltas: _Optional[_Iterable[_Union[Delta, _Mapping]]] = ...) -> None: ...

class Delta(_message.Message):
    __slots__ = ("attempt_id", "index", "text", "token_ids", "finish", "error", "logprobs", "timings", "prompt_logprobs", "completion_tokens", "tool_calls", "reasoning", "refusal", "reasoning_tokens", "stop_sequence", "pooled")
    class Finish(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        NOT_FINISHED: _ClassVar[Delta.Finish]
        STOP: _ClassVar[Delta.Finish]
        LENGTH: _ClassVar[Delta.Finish]
        CANCELLED: _ClassVar[Delta.Finish]
        FAILED: _ClassVar[Delta.Finish]
        TOOL_CALLS: _ClassVar[Delta.Finish]
        CONTENT_FILTER: _ClassVar[Delta.Finish]
    NOT_FINISHED: Delta.Finish
    STOP: Delta.Finish
    LENGTH: Delta.Finish
    CANCELLED: Delta.Finish
    FAILED: Delta.Finish
    TOOL_CALLS: Delta.Finish
    CONTENT_FILTER: Delta.Finish
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    REASONING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    POOLED_FIELD_NUMBER: _ClassVar[int]
    attempt_id: str
    index: int
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    finish: Delta.Finish
    error: str
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    timings: Timings
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    completion_tokens: int
    tool_calls: _containers.RepeatedCompositeFieldContainer[ToolCall]
    reasoning: str
    refusal: str
    reasoning_tokens: int
    stop_sequence: str
    pooled: _containers.RepeatedCompositeFieldContainer[Pooled]
    def __init__(self, attempt_id: _Optional[str] = ..., index: _Optional[int] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., finish: _Optional[_Union[Delta.Finish, str]] = ..., error: _Optional[str] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ..., completion_tokens: _Optional[int] = ..., tool_calls: _Optional[_Iterable[_Union[ToolCall, _Mapping]]] = ..., reasoning: _Optional[str] = ..., refusal: _Optional[str] = ..., reasoning_tokens: _Optional[int] = ..., stop_sequence: _Optional[str] = ..., pooled: _Optional[_Iterable[_Union[Pooled, _Mapping]]] = ...) -> None: ...

class Pooled(_message.Message):
    __slots__ = ("index", "vector", "score")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    VECTOR_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    index: int
    vector: bytes
    score: float
    def __init__(self, index: _Optional[int] = ..., vector: _Optional[bytes] = ..., score: _Optional[float] = ...) -> None: ...

class ToolCall(_message.Message):
    __slots__ = ("index", "id", "name", "arguments")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    index: int
    id: str
    name: str
    arguments: str
    def __init__(self, index: _Optional[int] = ..., id: _Optional[str] = ..., name: _Optional[str] = ..., arguments: _Optional[str] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("token", "raw", "logprob", "top", "absent")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    RAW_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    ABSENT_FIELD_NUMBER: _ClassVar[int]
    token: str
    raw: bytes
    logprob: float
    top: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    absent: bool
    def __init__(self, token: _Optional[str] = ..., raw: _Optional[bytes] = ..., logprob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ..., absent: _Optional[bool] = ...) -> None: ...

class Timings(_message.Message):
    __slots__ = ("cached_prompt_tokens", "cached_unknown")
    CACHED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    cached_prompt_tokens: int
    cached_unknown: bool
    def __init__(self, cached_prompt_tokens: _Optional[int] = ..., cached_unknown: _Optional[bool] = ...) -> None: ...

class Prefixes(_message.Message):
    __slots__ = ("hashes",)
    HASHES_FIELD_NUMBER: _ClassVar[int]
    hashes: bytes
    def __init__(self, hashes: _Optional[bytes] = ...) -> None: ...

class Trains(_message.Message):
    __slots__ = ("runs", "max_rank", "usd_per_mtok")
    RUNS_FIELD_NUMBER: _ClassVar[int]
    MAX_RANK_FIELD_NUMBER: _ClassVar[int]
    USD_PER_MTOK_FIELD_NUMBER: _ClassVar[int]
    runs: int
    max_rank: int
    usd_per_mtok: float
    def __init__(self, runs: _Optional[int] = ..., max_rank: _Optional[int] = ..., usd_per_mtok: _Optional[float] = ...) -> None: ...

class Content(_message.Message):
    __slots__ = ("sha256", "bytes")
    SHA256_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    sha256: bytes
    bytes: int
    def __init__(self, sha256: _Optional[bytes] = ..., bytes: _Optional[int] = ...) -> None: ...

class Train(_message.Message):
    __slots__ = ("job_id", "run", "tenant", "model", "tuned_model", "data", "validation", "snapshot", "epochs", "batch_size", "learning_rate", "rank", "alpha", "target", "seed", "revision")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TUNED_MODEL_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    VALIDATION_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    ALPHA_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    run: str
    tenant: str
    model: str
    tuned_model: str
    data: Content
    validation: Content
    snapshot: Content
    epochs: int
    batch_size: int
    learning_rate: float
    rank: int
    alpha: float
    target: str
    seed: int
    revision: str
    def __init__(self, job_id: _Optional[str] = ..., run: _Optional[str] = ..., tenant: _Optional[str] = ..., model: _Optional[str] = ..., tuned_model: _Optional[str] = ..., data: _Optional[_Union[Content, _Mapping]] = ..., validation: _Optional[_Union[Content, _Mapping]] = ..., snapshot: _Optional[_Union[Content, _Mapping]] = ..., epochs: _Optional[int] = ..., batch_size: _Optional[int] = ..., learning_rate: _Optional[float] = ..., rank: _Optional[int] = ..., alpha: _Optional[float] = ..., target: _Optional[str] = ..., seed: _Optional[int] = ..., revision: _Optional[str] = ...) -> None: ...

class StopTraining(_message.Message):
    __slots__ = ("run", "snapshot")
    RUN_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    run: str
    snapshot: bool
    def __init__(self, run: _Optional[str] = ..., snapshot: _Optional[bool] = ...) -> None: ...

class Training(_message.Message):
    __slots__ = ("job_id", "run", "step", "total_steps", "trained_tokens", "steps", "tokens_per_s", "end", "error_code", "error", "revision")
    class End(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        RUNNING: _ClassVar[Training.End]
        SUCCEEDED: _ClassVar[Training.End]
        FAILED: _ClassVar[Training.End]
        STOPPED: _ClassVar[Training.End]
        GIVEN_UP: _ClassVar[Training.End]
    RUNNING: Training.End
    SUCCEEDED: Training.End
    FAILED: Training.End
    STOPPED: Training.End
    GIVEN_UP: Training.End
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    TOTAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    TRAINED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    ERROR_CODE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    run: str
    step: int
    total_steps: int
    trained_tokens: int
    steps: _containers.RepeatedCompositeFieldContainer[TrainingStep]
    tokens_per_s: float
    end: Training.End
    error_code: str
    error: str
    revision: str
    def __init__(self, job_id: _Optional[str] = ..., run: _Optional[str] = ..., step: _Optional[int] = ..., total_steps: _Optional[int] = ..., trained_tokens: _Optional[int] = ..., steps: _Optional[_Iterable[_Union[TrainingStep, _Mapping]]] = ..., tokens_per_s: _Optional[float] = ..., end: _Optional[_Union[Training.End, str]] = ..., error_code: _Optional[str] = ..., error: _Optional[str] = ..., revision: _Optional[str] = ...) -> None: ...

class TrainingStep(_message.Message):
    __slots__ = ("step", "loss", "accuracy", "validation_loss")
    STEP_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    ACCURACY_FIELD_NUMBER: _ClassVar[int]
    VALIDATION_LOSS_FIELD_NUMBER: _ClassVar[int]
    step: int
    loss: float
    accuracy: float
    validation_loss: float
    def __init__(self, step: _Optional[int] = ..., loss: _Optional[float] = ..., accuracy: _Optional[float] = ..., validation_loss: _Optional[float] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("sha256", "offset")
    SHA256_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    sha256: bytes
    offset: int
    def __init__(self, sha256: _Optional[bytes] = ..., offset: _Optional[int] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class StoreRequest(_message.Message):
    __slots__ = ("begin", "data")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    begin: StoreBegin
    data: bytes
    def __init__(self, begin: _Optional[_Union[StoreBegin, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class StoreBegin(_message.Message):
    __slots__ = ("job_id", "run", "kind", "step", "content")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        SNAPSHOT: _ClassVar[StoreBegin.Kind]
        CHECKPOINT: _ClassVar[StoreBegin.Kind]
        ADAPTER: _ClassVar[StoreBegin.Kind]
    SNAPSHOT: StoreBegin.Kind
    CHECKPOINT: StoreBegin.Kind
    ADAPTER: StoreBegin.Kind
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    run: str
    kind: StoreBegin.Kind
    step: int
    content: Content
    def __init__(self, job_id: _Optional[str] = ..., run: _Optional[str] = ..., kind: _Optional[_Union[StoreBegin.Kind, str]] = ..., step: _Optional[int] = ..., content: _Optional[_Union[Content, _Mapping]] = ...) -> None: ...

class StoreReply(_message.Message):
    __slots__ = ("offset", "done")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    offset: int
    done: bool
    def __init__(self, offset: _Optional[int] = ..., done: _Optional[bool] = ...) -> None: ...

class Bid(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Release(_message.Message):
    __slots__ = ("release_id", "attempt_ids")
    RELEASE_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    release_id: str
    attempt_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, release_id: _Optional[str] = ..., attempt_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class Released(_message.Message):
    __slots__ = ("release_id", "attempt_ids")
    RELEASE_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    release_id: str
    attempt_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, release_id: _Optional[str] = ..., attempt_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("gateway", "peers", "heartbeat_s", "grace_s", "cancel", "reads_bunches", "protocol", "highest_protocol", "reads_prefixes", "reads_models", "tunes", "worker_ports", "reads_held")
    GATEWAY_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_S_FIELD_NUMBER: _ClassVar[int]
    GRACE_S_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    READS_BUNCHES_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    HIGHEST_PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    READS_PREFIXES_FIELD_NUMBER: _ClassVar[int]
    READS_MODELS_FIELD_NUMBER: _ClassVar[int]
    TUNES_FIELD_NUMBER: _ClassVar[int]
    WORKER_PORTS_FIELD_NUMBER: _ClassVar[int]
    READS_HELD_FIELD_NUMBER: _ClassVar[int]
    gateway: str
    peers: _containers.RepeatedScalarFieldContainer[str]
    heartbeat_s: float
    grace_s: float
    cancel: _containers.RepeatedScalarFieldContainer[str]
    reads_bunches: bool
    protocol: int
    highest_protocol: int
    reads_prefixes: bool
    reads_models: bool
    tunes: bool
    worker_ports: _containers.RepeatedScalarFieldContainer[int]
    reads_held: bool
    def __init__(self, gateway: _Optional[str] = ..., peers: _Optional[_Iterable[str]] = ..., heartbeat_s: _Optional[float] = ..., grace_s: _Optional[float] = ..., cancel: _Optional[_Iterable[str]] = ..., reads_bunches: _Optional[bool] = ..., protocol: _Optional[int] = ..., highest_protocol: _Optional[int] = ..., reads_prefixes: _Optional[bool] = ..., reads_models: _Optional[bool] = ..., tunes: _Optional[bool] = ..., worker_ports: _Optional[_Iterable[int]] = ..., reads_held: _Optional[bool] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("attempt_id",)
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    attempt_id: str
    def __init__(self, attempt_id: _Optional[str] = ...) -> None: ...

class Draining(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Bye(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Ping(_message.Message):
    __slots__ = ("nonce",)
    NONCE_FIELD_NUMBER: _ClassVar[int]
    nonce: int
    def __init__(self, nonce: _Optional[int] = ...) -> None: ...

class Pong(_message.Message):
    __slots__ = ("nonce", "unix_s")
    NONCE_FIELD_NUMBER: _ClassVar[int]
    UNIX_S_FIELD_NUMBER: _ClassVar[int]
    nonce: int
    unix_s: float
    def __init__(self, nonce: _Optional[int] = ..., unix_s: _Optional[float] = ...) -> None: ...
