"""Makes the tenant, salt and session of a request those of the tenant of the caller's token."""

from protos.generation.v1 import generation_pb2 as pb
from protos.rpc.identity import Identity, PermissionDeniedError


def check_tenant(identity: Identity | None, named: str | None, field: str) -> str:
    """Returns the tenant of the caller's token or, without one, the named tenant; empty for none.

    named: the tenant that the request names. field: the field that names this tenant. Raises PermissionDeniedError if
    the request names another tenant than the token.
    """
    if identity is None or not identity.tenant:
        return named or ""
    if named not in (None, identity.tenant):
        raise PermissionDeniedError(
            "the token is that of another tenant", fields={field: "is not the tenant of the token"}
        )
    return identity.tenant


def bind(identity: Identity | None, cache: pb.CacheOptions) -> str:
    """Sets the tenant of the caller's token, and puts the tenant before salt and session; returns the tenant.

    Changes nothing if there is no token, or if the token has no tenant. The returned tenant may be empty.

    Raises InvalidField and PermissionDeniedError.
    """
    tenant = check_tenant(identity, cache.tenant_id if cache.HasField("tenant_id") else None, "cache.tenant_id")
    if identity is None or not identity.tenant:
        return tenant
    salt = identity.bound_salt(cache.salt if cache.HasField("salt") else None)
    session = identity.bound_name(cache.session_id, "cache.session_id") if cache.HasField("session_id") else None
    cache.tenant_id = identity.tenant
    if salt is not None:
        cache.salt = salt
    if session is not None:
        cache.session_id = session
    return identity.tenant
