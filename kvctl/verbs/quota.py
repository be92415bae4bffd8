"""`kvctl quota`: floors and ceilings of tenants and salts."""

from typing import Annotated, Any

import typer

from kvctl.display import tables
from kvctl.display.tables import account
from kvctl.options import DryRun, Yes
from kvctl.session import Session, ask_confirmed, verb
from kvctl.shards import Shard
from kvctl.status import CommandError, Status
from protos.kvcache.v1 import kvcache_pb2 as pb

app = typer.Typer(help="List, set and delete quotas of tenants and salts.")

TenantAccount = Annotated[str | None, typer.Option("--tenant", help="Of this tenant.")]
SaltAccount = Annotated[str | None, typer.Option("--salt", help="Of this salt.")]


@verb(app, "list", "kvctl quota list", lists=True)
def list_quotas(session: Session) -> None:
    """List quotas and the blocks of their accounts in each pool."""
    found = session.ask(Shard.quotas)
    session.show_list(found, tables.QUOTAS, lambda answer: answer.quotas, "quotas")


@verb(app, "set", "kvctl quota set --tenant acme --device-floor 8 --device-ceiling 1024")
def set_quota(
    session: Session,
    tenant: TenantAccount = None,
    salt: SaltAccount = None,
    device_floor: Annotated[
        int,
        typer.Option(
            min=0, help="Number of device blocks below which other accounts never evict blocks of this account."
        ),
    ] = 0,
    device_ceiling: Annotated[
        int | None, typer.Option(min=0, help="The most device blocks that the account may have.")
    ] = None,
    host_floor: Annotated[
        int,
        typer.Option(
            min=0, help="Number of host blocks below which other accounts never evict blocks of this account."
        ),
    ] = 0,
    host_ceiling: Annotated[
        int | None, typer.Option(min=0, help="The most host blocks that the account may have.")
    ] = None,
    dry_run: DryRun = False,
) -> None:
    """Set a quota; it replaces an earlier quota of the same account."""
    quota = pb.Quota(
        **_account(tenant, salt),
        device_floor_blocks=device_floor,
        device_ceiling_blocks=device_ceiling,
        host_floor_blocks=host_floor,
        host_ceiling_blocks=host_ceiling,
    )
    request = pb.SetQuotaRequest(quota=quota, validate_only=dry_run)
    found = session.ask(lambda shard: shard.admin.call(shard.admin.stub.SetQuota, request))
    done = "would set" if dry_run else "set"
    session.show_all(found, lambda _wide: found.lines(lambda _: f"{done} the quota of {account(quota)}"))


@verb(app, "delete", "kvctl quota delete --tenant acme --yes")
def delete_quota(
    session: Session, tenant: TenantAccount = None, salt: SaltAccount = None, dry_run: DryRun = False, yes: Yes = False
) -> None:
    """Delete a quota: afterwards its account has neither floor nor ceiling."""
    request = pb.DeleteQuotaRequest(**_account(tenant, salt))
    named = account(request)

    def delete(shard: Shard, dry_run: bool) -> pb.Quota | pb.DeleteQuotaResponse:
        found = [item.quota for item in shard.quotas().quotas if account(item.quota) == named]
        if not found:
            raise CommandError(f"there is no quota of {named}", Status.REFUSED, is_missing=True)
        return found[0] if dry_run else shard.admin.call(shard.admin.stub.DeleteQuota, request)

    found = ask_confirmed(session, delete, lambda _: f"Delete the quota of {named}?", dry_run=dry_run, yes=yes)
    done = "would delete" if dry_run else "deleted"
    session.show_all(found, lambda _wide: found.lines(lambda _: f"{done} the quota of {named}"))


def _account(tenant: str | None, salt: str | None) -> dict[str, Any]:
    if (tenant is None) == (salt is None):
        raise typer.BadParameter("name a tenant or a salt", param_hint="--tenant")
    return {"salt": salt} if tenant is None else {"tenant_id": tenant}
