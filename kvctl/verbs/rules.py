"""`kvctl rules`: retention rules for requests without retention requests of their own."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
import yaml
from google.protobuf.field_mask_pb2 import FieldMask
from google.protobuf.json_format import ParseDict, ParseError

from kvctl.display.output import Column, blocks, lasting, printable
from kvctl.options import DryRun, Prompt, Yes, duration_of
from kvctl.session import Session, ask_confirmed, verb
from kvctl.shards import Shard
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


@verb(app, "list", "kvctl rules list -o wide", lists=True)
def list_rules(session: Session) -> None:
    """List rules in the order in which they are checked."""
    found = session.ask(Shard.rules)
    session.show_list(found, _RULES, lambda answer: answer.rules, "rules")


@verb(app, "set", "kvctl rules set acme --salt acme --priority 80 --for 1h")
def set_rule(
    session: Session,
    *,
    name: Name,
    rule_file: Annotated[
        Path | None,
        typer.Option(
            "--rule-file", "-f", dir_okay=False, exists=True, help="The rule, or a listing with it, as YAML or JSON."
        ),
    ] = None,
    order: Annotated[int, typer.Option(help="Rules with a smaller number are checked first.")] = 0,
    salt: Annotated[str | None, typer.Option(help="Requests with this salt.")] = None,
    tenant: Annotated[str | None, typer.Option(help="Requests of this tenant.")] = None,
    adapter: Annotated[int | None, typer.Option(min=0, help="Requests with this adapter.")] = None,
    prompt: Prompt,
    start: Annotated[int | None, typer.Option(min=0, help="Blocks that begin at or after this token.")] = None,
    end: Annotated[int | None, typer.Option(min=0, help="Blocks that begin before this token.")] = None,
    priority: Annotated[int | None, typer.Option(min=0, max=100, help="Retention priority of the blocks.")] = None,
    lasts: Annotated[str, typer.Option("--for", help="How long the priority lasts: 90s, 1h30m, 2d.")] = "",
    pin_for: Annotated[str, typer.Option(help="How long to pin the blocks: 90s, 1h30m, 2d.")] = "",
    no_store: Annotated[bool, typer.Option("--no-store", help="Store nothing of these requests in the cache.")] = False,
    offload_min_priority: Annotated[
        int | None, typer.Option(min=0, max=100, help="Drop blocks below this priority instead of offloading them.")
    ] = None,
    dry_run: DryRun = False,
    yes: Yes = False,
) -> None:
    """Make a rule, or replace the rule with this name; prompt options give the prefix of prompts that it matches.

    Asks before it replaces a rule, and before it makes a rule that matches all requests.
    """
    match = pb.RuleMatch(salt=salt, tenant_id=tenant, adapter_id=adapter, start=start, end=end)
    match.prefix_token_ids.extend(prompt.token_ids(session) or [])
    action = pb.RuleAction(retention_priority=priority, no_store=no_store, offload_min_priority=offload_min_priority)
    if lasts:
        action.retention_duration.CopyFrom(duration_of(lasts, "--for"))
    if pin_for:
        action.pin_duration.CopyFrom(duration_of(pin_for, "--pin-for"))
    if rule_file is None:
        if not action.ByteSize():
            options = "--priority, --pin-for, --no-store, --offload-min-priority or --rule-file"
            raise typer.BadParameter(f"say what the rule does: {options}", param_hint="--priority")
        rule = pb.RetentionRule(name=name, order=order, match=match, action=action)
        _set(session, lambda _shard: rule, dry_run=dry_run, yes=yes)
    elif match.ByteSize() or action.ByteSize() or order:
        raise typer.BadParameter("replaces all other options of the rule", param_hint="--rule-file")
    else:
        data, several = _read(rule_file), len(session.shards) > 1
        rules = {shard.address: _rule_in(data, rule_file, name, shard.address, several) for shard in session.shards}
        _set(session, lambda shard: rules[shard.address], dry_run=dry_run, yes=yes)


def _read(file: Path) -> Any:
    try:
        return yaml.safe_load(file.read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise _no_rule(file, error) from None


def _rule_in(data: Any, file: Path, name: str, shard: str, several: bool) -> pb.RetentionRule:
    """The rule in a file for a shard. several: whether the file is for several shards."""
    try:
        # One rule, or all rules as `kvctl rules list -o yaml` prints them, of one or several shards.
        is_own = "shards" in data
        data = data["shards"][shard] if is_own else data
        found = [item for item in data["rules"] if item["name"] == name] if "rules" in data else [data]
        if not found:
            raise ValueError(f"{name!r} is not among its rules")
        rule: pb.RetentionRule = ParseDict(found[0], pb.RetentionRule())
    except (ValueError, AttributeError, LookupError, TypeError, ParseError) as error:
        raise _no_rule(file, error) from None
    if rule.name not in ("", name):
        raise typer.BadParameter(f"{file}: has the rule {rule.name!r}", param_hint="--rule-file")
    rule.name = name
    if several and rule.etag and not is_own:
        raise typer.BadParameter(f"{file}: an etag belongs to a single shard: remove it", param_hint="--rule-file")
    return rule


def _no_rule(file: Path, error: Exception) -> typer.BadParameter:
    said = " ".join(str(error).split())
    return typer.BadParameter(f"{file}: is no rule: {said}", param_hint="--rule-file")


class _Change(NamedTuple):
    """A rule, the earlier rule of its name, and the answer to the call that makes or replaces the rule."""

    rule: pb.RetentionRule
    earlier: pb.RetentionRule | None
    answer: pb.CreateRetentionRuleResponse | pb.UpdateRetentionRuleResponse


def _set(session: Session, rule_of: Callable[[Shard], pb.RetentionRule], *, dry_run: bool, yes: bool) -> None:
    tried: dict[str, _Change] = {}

    def put(shard: Shard, dry_run: bool) -> _Change:
        rule = pb.RetentionRule()
        rule.CopyFrom(rule_of(shard))
        admin = shard.admin
        if before := tried.get(shard.address):
            earlier = before.earlier
            # The call replaces only the rule that the question showed, not a later change.
            rule.etag = rule.etag or (earlier.etag if earlier else "")
        else:
            earlier = next((item for item in shard.rules().rules if item.name == rule.name), None)
        answer: pb.CreateRetentionRuleResponse | pb.UpdateRetentionRuleResponse
        if earlier is None:
            create = pb.CreateRetentionRuleRequest(rule=rule, validate_only=dry_run)
            answer = admin.call(admin.stub.CreateRetentionRule, create)
        else:
            whole = FieldMask(paths=["order", "match", "action"])
            update = pb.UpdateRetentionRuleRequest(rule=rule, update_mask=whole, validate_only=dry_run)
            answer = admin.call(admin.stub.UpdateRetentionRule, update)
        made = tried[shard.address] = _Change(rule, earlier, answer)
        return made

    found = ask_confirmed(session, put, _question, dry_run=dry_run, yes=yes)
    session.show_all(
        found, lambda _wide: found.lines(lambda made: _told(made, dry_run=dry_run)), lambda made: made.answer
    )


def _question(made: _Change) -> str:
    """The question before a change; empty if nobody needs to be asked."""
    if made.earlier is not None:
        return f"Change rule {made.rule.name} from {_said(made.earlier)} to {_said(made.rule)}?"
    if _is_for_all(made.rule.match):
        return f"Make rule {made.rule.name}, which matches all requests: {_said(made.rule)}?"
    return ""


def _told(made: _Change, *, dry_run: bool) -> str:
    rule, earlier = made.rule, made.earlier
    done = ("would make" if dry_run else "made") if earlier is None else ("would change" if dry_run else "changed")
    lines = [f"{done} rule {rule.name}: cached now: {blocks(made.answer.matching_blocks)}"]
    if dry_run:
        lines += [_said(rule)] if earlier is None else [f"from {_said(earlier)}", f"to {_said(rule)}"]
    return "\n".join(lines)


def _said(rule: pb.RetentionRule) -> str:
    return f"order {rule.order}, {_match(rule)}: {_action(rule)}"


def _is_for_all(match: pb.RuleMatch) -> bool:
    """Whether the rule matches every request; start and end only select blocks of each request."""
    named = ("salt", "tenant_id", "adapter_id")
    return not match.prefix_token_ids and not any(match.HasField(name) for name in named)


@verb(app, "delete", "kvctl rules delete acme --yes")
def delete_rule(session: Session, name: Name, dry_run: DryRun = False, yes: Yes = False) -> None:
    """Delete a rule and end its leases."""

    def delete(shard: Shard, dry_run: bool) -> pb.DeleteRetentionRuleResponse:
        request = pb.DeleteRetentionRuleRequest(name=name, validate_only=dry_run)
        return shard.admin.call(shard.admin.stub.DeleteRetentionRule, request)

    found = ask_confirmed(
        session,
        delete,
        lambda answer: f"Delete rule {printable(name)} and end {answer.ended_leases} leases?",
        dry_run=dry_run,
        yes=yes,
    )
    done = "would delete" if dry_run else "deleted"
    session.show_all(
        found,
        lambda _wide: found.lines(
            lambda answer: f"{done} rule {printable(name)}; {answer.ended_leases} leases end with it"
        ),
    )
