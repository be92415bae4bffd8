"""Restricts requests and answers to a token's tenant; a token without a tenant allows all."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from cachemgr.blocks.hit_counters import TokenCount, TokenMeter
from cachemgr.errors import UnknownHoldError, UnknownRuleError, UnknownSequenceError
from cachemgr.types import Explanation, HoldView, MissReason, Quota, RetentionRule, Scope
from protos.errors import InvalidField
from protos.kvcache.v1 import kvcache_pb2 as pb
from protos.rpc.identity import Identity, PermissionDeniedError, Role, current


def check(method: str, request: Any) -> None:
    """Refuses requests about other tenants before the call is served, whether the named object exists or not.

    Raises PermissionDeniedError, InvalidField.
    """
    identity = current()
    if identity is None:
        return
    # A scheduler sees all prompts anyway.
    reads_prompts = identity.role in (Role.OPERATOR, Role.SCHEDULER)
    if not reads_prompts and getattr(request, "include_token_ids", False):
        raise PermissionDeniedError(
            "prompts are for operators and schedulers only",
            fields={"include_token_ids": "needs the role operator or scheduler"},
        )
    if not identity.tenant:
        return
    name = method.rpartition("/")[2]
    if name not in _CHECKS:
        # A method without a check concerns all tenants, such as SetQuota, which divides the cache between tenants.
        raise PermissionDeniedError("this method concerns all tenants, but the token belongs to one tenant")
    _CHECKS[name](identity, request)


def check_ids(_method: str, request: Any) -> None:
    """Refuses an executor or scheduler that uses another's id. Raises PermissionDeniedError."""
    identity = current()
    if identity is None or not identity.ids:
        return
    field = f"{identity.role}_id"
    for path, message in _named(request):
        if field in message.DESCRIPTOR.fields_by_name:
            identity.check_id(getattr(message, field), path + field)


def _named(request: Any) -> Iterable[tuple[str, Any]]:
    """The messages of a request that may name the caller, with their paths."""
    yield "", request
    if isinstance(request, pb.AdmitSequencesRequest):
        yield from ((f"admissions[{index}].", admission) for index, admission in enumerate(request.admissions))


def _allow(_identity: Identity, _request: Any) -> None:
    """Allows a request in which nothing names a tenant."""


def _check_name(identity: Identity, message: Any, field: str, path: str) -> None:
    if message.HasField(field) and not identity.owns(getattr(message, field)):
        raise _foreign(identity, path + field)


def _foreign(identity: Identity, path: str) -> PermissionDeniedError:
    return PermissionDeniedError(
        f"{path} must be of the token's tenant",
        fields={path: f'must be "{identity.tenant}" or begin with "{identity.tenant}/"'},
    )


def _check_prefix(identity: Identity, prefix: pb.PrefixSelector, path: str) -> None:
    if not prefix.HasField("salt") or not identity.owns(prefix.salt):
        raise _foreign(identity, f"{path}.salt")


def _check_salt(identity: Identity, request: Any) -> None:
    _check_name(identity, request, "salt", "")


def _check_filter(identity: Identity, request: Any) -> None:
    _check_name(identity, request.filter, "salt", "filter.")
    _check_name(identity, request.filter, "session_id", "filter.")
    _check_name(identity, request.filter, "tenant_id", "filter.")
    if request.filter.HasField("prefix"):
        _check_prefix(identity, request.filter.prefix, "filter.prefix")


def _check_purge(identity: Identity, request: pb.PurgeBlocksRequest) -> None:
    _check_filter(identity, request)
    if not request.filter.HasField("salt"):
        raise _foreign(identity, "filter.salt")


def _check_forget(identity: Identity, request: pb.ForgetBlocksRequest) -> None:
    if request.HasField("prefix"):
        _check_prefix(identity, request.prefix, "prefix")
    _check_name(identity, request, "salt", "")
    _check_name(identity, request, "session_id", "")


def _check_explain(identity: Identity, request: pb.ExplainPrefixRequest) -> None:
    if request.HasField("prefix"):
        _check_prefix(identity, request.prefix, "prefix")


def _check_pin(identity: Identity, request: pb.PinPrefixRequest) -> None:
    _check_prefix(identity, request.prefix, "prefix")


def _check_stats(_identity: Identity, request: pb.GetStatsRequest) -> None:
    if request.HasField("window"):
        raise InvalidField("window", "is known for all tenants together only")


_CHECKS: Mapping[str, Callable[[Identity, Any], None]] = {
    "ListPools": _allow,
    "GetPool": _allow,
    "GetStats": _check_stats,
    "ListBlocks": _check_filter,
    "ListPrefixes": _check_filter,
    "ListSequences": _check_salt,
    "ListLeases": _allow,
    "ListHolds": _allow,
    "ReleaseHold": _allow,
    "PinPrefix": _check_pin,
    "ExplainPrefix": _check_explain,
    "PurgeBlocks": _check_purge,
    "ForgetBlocks": _check_forget,
    "GetRetentionRule": _allow,
    "ListRetentionRules": _allow,
    "ListQuotas": _allow,
    "WatchEvents": _check_salt,
}


def sees_all() -> bool:
    """Whether the caller is not limited to one tenant."""
    identity = current()
    return identity is None or not identity.tenant


def sees(scope: Scope | None) -> bool:
    """Whether the caller may see a cache scope."""
    return sees_all() or (scope is not None and _owns(scope.salt))


def _owns(salt: str | None) -> bool:
    identity = current()
    return identity is None or identity.owns(salt)


def sees_account(account: Quota) -> bool:
    """Whether a quota belongs to the caller."""
    return _owns(account.tenant_id if account.tenant_id is not None else account.salt)


def sees_rule(rule: RetentionRule) -> bool:
    """Whether a rule is about the caller's requests only."""
    return sees_all() or any(_owns(name) for name in (rule.match.salt, rule.match.tenant_id))


def visible_rule(rule: RetentionRule) -> RetentionRule:
    """Returns the rule. Raises UnknownRuleError, as if it did not exist, for a rule of other tenants."""
    if not sees_rule(rule):
        raise UnknownRuleError(f"there is no rule {rule.name!r}", fields={"name": "is not known"})
    return rule


def sees_hold(hold: HoldView) -> bool:
    """Whether a hold keeps the caller's blocks."""
    return _owns(hold.salt)


def check_hold(name: str, holds: Iterable[HoldView]) -> None:
    """Raises UnknownHoldError, as if it did not exist, for a hold of other tenants."""
    if not any(hold.name == name and sees_hold(hold) for hold in holds):
        raise UnknownHoldError(f"there is no hold {name!r}", fields={"name": "is not known"})


def check_sequence(sequence_id: str, scope: Scope | None) -> None:
    """Raises UnknownSequenceError, as if it did not exist, for a sequence of other tenants."""
    if not sees(scope):
        raise UnknownSequenceError(f"there is no sequence {sequence_id!r}", fields={"sequence_id": "is not known"})


def redact_explanation(found: Explanation) -> Explanation:
    """Returns the explanation without information about other tenants' prompts."""
    if not sees_all():
        if found.miss_reason is MissReason.OTHER_SALT:
            found.miss_reason = MissReason.NEVER_STORED
        if found.removal is not None:
            found.removal = found.removal._replace(for_sequence_id="")
    return found


def redact_pool(pool: pb.Pool) -> pb.Pool:
    """Returns the pool without its totals over all tenants."""
    if sees_all():
        return pool
    return pb.Pool(pool_id=pool.pool_id, spec=pool.spec, block_size=pool.block_size, total_blocks=pool.total_blocks)


def visible_lookups(meter: TokenMeter) -> TokenMeter:
    """Returns the lookups of the caller's salts only."""
    if sees_all():
        return meter
    seen = TokenMeter()
    seen.salts = {salt: count for salt, count in meter.salts.items() if _owns(salt)}
    counts = seen.salts.values()
    seen.total = TokenCount(sum(count.queried for count in counts), sum(count.hit for count in counts))
    return seen
