"""The only table of roles and methods. No role may call a method that is not in the table."""

from collections.abc import Mapping

from protos.rpc.identity import Role

# Health and reflection have no data of callers; probes and tools have no token.
_OPEN = ("grpc.health.v1.", "grpc.reflection.")

_READING = ("Check", "Explain", "Get", "List", "Preview", "Watch")

# By service, then by the beginning of the method's name; the first match decides.
_TABLE: Mapping[str, tuple[tuple[tuple[str, ...], frozenset[Role]], ...]] = {
    "generation.v1.GenerationService": (
        (("GetModel", "GetLoads", "TokenizePrompt"), frozenset({Role.CALLER, Role.OPERATOR, Role.VIEWER})),
        (("",), frozenset({Role.CALLER})),
    ),
    "vllm.grpc.engine.VllmEngine": (
        (("Get", "HealthCheck"), frozenset({Role.CALLER, Role.OPERATOR, Role.VIEWER})),
        (("",), frozenset({Role.CALLER})),
    ),
    "generation.v1.SchedulerAdminService": ((("",), frozenset({Role.OPERATOR})),),
    "generation.v1.EngineService": ((("",), frozenset({Role.ROUTER})),),
    "generation.v1.RouterService": ((_READING, frozenset({Role.OPERATOR, Role.VIEWER})),),
    "execution.v1.ExecutorService": ((("",), frozenset({Role.SCHEDULER})),),
    "kvcache.v1.CacheManagerService": (
        (("RegisterExecutor", "RenewExecutor", "UpdateWeights", "ConfirmTransfers"), frozenset({Role.EXECUTOR})),
        (("SendHints",), frozenset({Role.SCHEDULER, Role.OPERATOR})),
        (("",), frozenset({Role.SCHEDULER})),
    ),
    "kvcache.v1.CacheAdminService": (
        (_READING, frozenset({Role.OPERATOR, Role.VIEWER})),
        (("",), frozenset({Role.OPERATOR})),
    ),
    "kvcache.v1.CacheEventService": ((_READING, frozenset({Role.OPERATOR, Role.VIEWER, Role.ROUTER, Role.SCHEDULER})),),
}

# Only for tokens without a tenant. CacheAdminService has separate rules, per method, for operators of one tenant.
_WHOLE = (
    "generation.v1.SchedulerAdminService/",
    "generation.v1.EngineService/",
    "generation.v1.RouterService/",
    "kvcache.v1.CacheManagerService/",
)

# Calls that are in the audit log.
_AUDITED = (
    "kvcache.v1.CacheAdminService/",
    "kvcache.v1.CacheEventService/",
    "kvcache.v1.CacheManagerService/SendHints",
    "generation.v1.SchedulerAdminService/",
    "generation.v1.RouterService/",
    "vllm.grpc.engine.VllmEngine/SubscribeKvEvents",
)


def is_open(method: str) -> bool:
    """Whether a method, "package.Service/Method", needs no token."""
    return method.startswith(_OPEN)


def is_whole(method: str) -> bool:
    """Whether a method is about all tenants, so that tokens of one tenant may not call it."""
    return method.startswith(_WHOLE)


def is_reading(method: str) -> bool:
    """Whether a method changes nothing, judging by its name."""
    return method.rpartition("/")[2].startswith(_READING)


def is_audited(method: str) -> bool:
    """Whether a call of a method leaves a line in the audit log."""
    return method.startswith(_AUDITED)


def roles_of(method: str) -> frozenset[Role]:
    """The roles that may call a method."""
    service, _, name = method.partition("/")
    return next((roles for begins, roles in _TABLE.get(service, ()) if name.startswith(begins)), frozenset())
