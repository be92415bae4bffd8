"""`kvctl rules`: retention rules for requests without retention requests of their own."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
import yaml
from google.protobuf.field_mask_pb2 import FieldMask
from google.protobuf.json_format import ParseDict, ParseError

from kvctl.display.output import Column, blocks, lasting, printable, table
from kvctl.options import DryRun, Prompt, Yes, duration_of
from kvctl.session import Session, call_confirmed, confirm, verb
from protos.kvcache.v1 import kvcache_pb2 as pb
from protos.kvcommon.v1 import kvcommon_pb2 as common

app = typer.Typer(help="List, set and delete retention rules.")

Name = Annotated[str, typer.Argument(help="Name of the rule.")]


def _match(rule: pb.RetentionRule) -> str:
    match = rule.match
    named = ("salt", "tenant_id", "adapter_id", "start", "end")
    parts = [f"{name} {printable(getattr(match, name))}" for name in named if match.HasField(name)]
    if match.prefix_token_ids:
        parts.append(f"prefix of {len(match.prefix_token_ids)} tokens")
    return ", ".join(parts) or "all"


def _action(rule: pb.RetentionRule) -> str:
    action, parts = rule.action, []
    if action.HasField("retention_priority"):
        parts.append(f"priority {action.retention_priority}")
    if action.HasField("retention_duration"):
        parts.append(f"for {lasting(action, 'retention_duration')}")
    if action.HasField("pin_duration"):
        parts.append(f"pin for {lasting(action, 'pin_duration')}")
    if action.no_store:
        parts.append("no store")
    if action.HasField("offload_min_priority"):
        parts.append(f"offload from priority {action.offload_min_priority}")
    if action.HasField("eviction_policy"):
        kind = common.EvictionKind.Name(action.eviction_policy.kind)
        parts.append(f"evict by {kind.removeprefix('EVICTION_KIND_').lower()}")
    return ", ".join(parts)


_RULES: Sequence[Column[pb.RetentionRule]] = (
    Column("NAME", lambda rule: rule.name),
    Column("ORDER", lambda rule: rule.order),
    Column("MATCH", _match),
    Column("ACTION", _action),
    Column("ETAG", lambda rule: rule.etag, wide=True),
)


@verb(app, "list", "kvctl rules list -o wide")
def list_rules(session: Session) -> None:
    """List rules in the order in which they are asked."""
    admin = session.admin
    answer = admin.all_pages(admin.stub.ListRetentionRules, pb.ListRetentionRulesRequest(), "rules")
    session.show(answer, lambda wide: table(_RULES, answer.rules, wide=wide))


@verb(app, "set", "kvctl rules set acme --salt acme --priority 80 --for 1h")
def set_rule(
    session: Session,
    *,
    name: Name,
    rule_file: Annotated[
        Path | None,
        typer.Option(
            "--rule-file", "-f", dir_okay=False, exists=True, help="The rule as YAML or JSON, or a listing with it."
        ),
    ] = None,
    order: Annotated[int, typer.Option(help="Rules with a smaller number are asked first.")] = 0,
    salt: Annotated[str | None, typer.Option(help="Requests with this salt.")] = None,
    tenant: Annotated[str | None, typer.Option(help="Requests of this tenant.")] = None,
    adapter: Annotated[int | None, typer.Option(min=0, help="Requests with this adapter.")] = None,
    prompt: Prompt,
    start: Annotated[int | None, typer.Option(min=0, help="Blocks that begin at or behind this token.")] = None,
    end: Annotated[int | None, typer.Option(min=0, help="Blocks that begin before this token.")] = None,
    priority: Annotated[int | None, typer.Option(min=0, max=100, help="Retention priority of the blocks.")] = None,
    lasts: Annotated[str, typer.Option("--for", help="How long they have it: 90s, 1h30m, 2d.")] = "",
    pin_for: Annotated[str, typer.Option(help="Pin the blocks for so long.")] = "",
    no_store: Annotated[bool, typer.Option("--no-store", help="Leave nothing of these requests in the cache.")] = False,
    offload_min_priority: Annotated[
        int | None, typer.Option(min=0, max=100, help="Drop blocks below it instead of offloading them.")
    ] = None,
    dry_run: DryRun = False,
    yes: Yes = False,
) -> None:
    """Make a rule, or replace the one with this name; prompt options name the beginning of its prompts.

    Asks before a rule is replaced, and before one is made that all requests meet.
    """
    match = pb.RuleMatch(salt=salt, tenant_id=tenant, adapter_id=adapter, start=start, end=end)
    match.prefix_token_ids.extend(prompt.token_ids(session) or [])
    action = pb.RuleAction(retention_priority=priority, no_store=no_store, offload_min_priority=offload_min_priority)
    if lasts:
        action.retention_duration.CopyFrom(duration_of(lasts, "--for"))
    if pin_for:
        action.pin_duration.CopyFrom(duration_of(pin_for, "--pin-for"))
    if rule_file is None:
        rule = pb.RetentionRule(name=name, order=order, match=match, action=action)
    elif match.ByteSize() or action.ByteSize() or order:
        raise typer.BadParameter("replaces all other options of the rule", param_hint="--rule-file")
    else:
        rule = _read(rule_file, name)
    _set(session, rule, dry_run=dry_run, yes=yes)


def _read(file: Path, name: str) -> pb.RetentionRule:
    try:
        data = yaml.safe_load(file.read_text())
        # One rule, or all of them as `kvctl rules list -o yaml` prints them.
        found = [item for item in data["rules"] if item["name"] == name] if "rules" in data else [data]
        if not found:
            raise ValueError(f"{name!r} is not among its rules")
        rule: pb.RetentionRule = ParseDict(found[0], pb.RetentionRule())
    except (OSError, ValueError, AttributeError, LookupError, TypeError, yaml.YAMLError, ParseError) as error:
        said = " ".join(str(error).split())
        raise typer.BadParameter(f"{file}: is no rule: {said}", param_hint="--rule-file") from None
    if rule.name not in ("", name):
        raise typer.BadParameter(f"{file}: has the rule {rule.name!r}", param_hint="--rule-file")
    rule.name = name
    return rule


def _set(session: Session, rule: pb.RetentionRule, *, dry_run: bool, yes: bool) -> None:
    admin = session.admin
    listed = admin.all_pages(admin.stub.ListRetentionRules, pb.ListRetentionRulesRequest(), "rules").rules
    earlier = next((item for item in listed if item.name == rule.name), None)

    def put(*, dry_run: bool) -> pb.CreateRetentionRuleResponse | pb.UpdateRetentionRuleResponse:
        if earlier is None:
            return admin.call(
                admin.stub.CreateRetentionRule, pb.CreateRetentionRuleRequest(rule=rule, validate_only=dry_run)
            )
        whole = FieldMask(paths=["order", "match", "action"])
        update = pb.UpdateRetentionRuleRequest(rule=rule, update_mask=whole, validate_only=dry_run)
        return admin.call(admin.stub.UpdateRetentionRule, update)

    answer = put(dry_run=True)
    if not dry_run:
        if earlier is not None:
            # The rule that is replaced is the one that the question showed, not a later change.
            rule.etag = rule.etag or earlier.etag
            confirm(f"Change rule {rule.name} from {_said(earlier)} to {_said(rule)}?", yes=yes)
        elif _is_for_all(rule.match):
            confirm(f"Make rule {rule.name}, which all requests meet: {_said(rule)}?", yes=yes)
        answer = put(dry_run=False)
    done = ("would make" if dry_run else "made") if earlier is None else ("would change" if dry_run else "changed")
    lines = [f"{done} rule {rule.name}: cached now: {blocks(answer.matching_blocks)}"]
    if dry_run:
        lines += [_said(rule)] if earlier is None else [f"from {_said(earlier)}", f"to {_said(rule)}"]
    session.show(answer, lambda _wide: "\n".join(lines))


def _said(rule: pb.RetentionRule) -> str:
    return f"order {rule.order}, {_match(rule)}: {_action(rule)}"


def _is_for_all(match: pb.RuleMatch) -> bool:
    """Whether every request meets it; start and end only say which blocks of each."""
    named = ("salt", "tenant_id", "adapter_id")
    return not match.prefix_token_ids and not any(match.HasField(name) for name in named)


@verb(app, "delete", "kvctl rules delete acme --yes")
def delete_rule(session: Session, name: Name, dry_run: DryRun = False, yes: Yes = False) -> None:
    """Delete a rule and end its leases."""
    admin = session.admin
    answer = call_confirmed(
        admin,
        admin.stub.DeleteRetentionRule,
        pb.DeleteRetentionRuleRequest(name=name),
        lambda found: f"Delete rule {printable(name)} and end {found.ended_leases} leases?",
        dry_run=dry_run,
        yes=yes,
    )
    done = "would delete" if dry_run else "deleted"
    session.show(answer, lambda _wide: f"{done} rule {printable(name)}; {answer.ended_leases} leases end with it")
