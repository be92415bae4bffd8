"""Names in a request become names of the caller's tenant."""

import pytest

from protos.generation.v1 import generation_pb2 as pb
from protos.rpc.errors import ServiceError
from protos.rpc.identity import Identity, Role
from scheduler.frontend.tenancy import bind

ACME = Identity("app", Role.CALLER, "acme")


def test_names_are_bound_to_the_tenant() -> None:
    cache = pb.CacheOptions(salt="s", session_id="1", no_store=True)
    assert bind(ACME, cache) == "acme"
    assert cache == pb.CacheOptions(salt="acme/s", session_id="acme/1", tenant_id="acme", no_store=True)
    bare = pb.CacheOptions()
    bind(ACME, bare)
    assert bare == pb.CacheOptions(salt="acme", tenant_id="acme")


def test_without_tokens_names_stay_as_they_are() -> None:
    cache = pb.CacheOptions(salt="s", tenant_id="t")
    assert bind(None, cache) == "t"
    assert cache == pb.CacheOptions(salt="s", tenant_id="t")


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("tenant_id", "globex", "PERMISSION_DENIED"),
        ("tenant_id", "", "PERMISSION_DENIED"),
        ("salt", "", "INVALID_FIELD"),
        ("session_id", "", "INVALID_FIELD"),
        ("session_id", "x" * 252, "INVALID_FIELD"),
    ],
)
def test_an_error_of_binding_names_its_field_and_changes_nothing(field: str, value: str, code: str) -> None:
    given = {"salt": "s"} | {field: value}
    cache = pb.CacheOptions(**given)
    with pytest.raises(ServiceError) as caught:
        bind(ACME, cache)
    assert (caught.value.reason, list(caught.value.fields)) == (code, [f"cache.{field}"])
    assert cache == pb.CacheOptions(**given)
