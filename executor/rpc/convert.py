"""Converts between the messages of execution.v1 and the executor's own types."""

import json
import math
from collections.abc import Sequence
from datetime import timedelta

from executor.errors import InvalidStepError
from executor.step import (
    BlockTableUpdate,
    Copy,
    Grammar,
    GrammarKind,
    Logprobs,
    NewSequence,
    Sampling,
    Step,
    StepOutput,
    Tier,
)
from protos.execution.v1 import execution_pb2 as pb
from protos.kvcommon.columns import cut
from protos.kvcommon.eviction import Layout, Policy, parse
from protos.kvcommon.v1 import kvcommon_pb2 as common
from protos.rpc.errors import InvalidField


def parse_step(message: pb.Step, layout: Layout) -> Step:
    """Parses a step.

    Raises InvalidStepError if columns do not match or name a sequence twice, or a parameter or policy is out of range.
    """
    _check_columns("chunk_tokens", message.chunk_tokens, message.chunk_sequences)
    _check_columns("table_groups", message.table_groups, message.table_sequences)
    _check_columns("table_counts", message.table_counts, message.table_sequences)
    if sum(message.table_counts) != len(message.table_slots):
        raise _invalid("table_slots", f"must have {sum(message.table_counts)} entries, as table_counts says")
    _check_columns("evicting_counts", message.evicting_counts, message.evicting_sequences)
    if sum(message.evicting_counts) != len(message.evicting_slots):
        raise _invalid("evicting_slots", f"must have {sum(message.evicting_counts)} entries, as evicting_counts says")
    chunks = dict(zip(message.chunk_sequences, message.chunk_tokens, strict=True))
    if len(chunks) != len(message.chunk_sequences):
        raise _invalid("chunk_sequences", "must not name a sequence twice")
    evicting = _parse_evicting(message)
    if len(evicting) != len(message.evicting_sequences):
        raise _invalid("evicting_sequences", "must not name a sequence twice")
    _check_columns("draft_tokens", message.draft_tokens, message.draft_sequences)
    drafts = dict(zip(message.draft_sequences, message.draft_tokens, strict=True))
    if len(drafts) != len(message.draft_sequences):
        raise _invalid("draft_sequences", "must not name a sequence twice")
    _check_columns("window_tokens", message.window_tokens, message.window_sequences)
    windows = dict(zip(message.window_sequences, message.window_tokens, strict=True))
    if len(windows) != len(message.window_sequences):
        raise _invalid("window_sequences", "must not name a sequence twice")
    return Step(
        number=message.step,
        removed=tuple(message.removed_sequences),
        new_sequences=tuple(_parse_new(new, layout) for new in message.new_sequences),
        chunks=chunks,
        idle=frozenset(message.idle_sequences),
        table_updates=tuple(_parse_table_updates(message)),
        copies=tuple(_parse_copies(message)),
        evicting=evicting,
        windows=windows,
        looking=frozenset(message.looking_sequences),
        awaits_copies=message.awaits_copies,
        drafts=drafts,
    )


def _parse_copies(message: pb.Step) -> list[Copy]:
    columns = [message.copy_tickets, message.copy_groups, message.copy_source_slots, message.copy_target_slots]
    for name in ("copy_groups", "copy_source_slots", "copy_target_slots"):
        _check_columns(name, getattr(message, name), message.copy_tickets)
    if not message.copy_source_tiers and not message.copy_target_tiers:
        return [Copy(*values) for values in zip(*columns, strict=True)]
    sources, targets = (_parse_tiers(name, message) for name in ("copy_source_tiers", "copy_target_tiers"))
    return [Copy(*values, *ends) for values, *ends in zip(zip(*columns, strict=True), sources, targets, strict=True)]


def _parse_tiers(name: str, message: pb.Step) -> list[Tier]:
    column = getattr(message, name)
    _check_columns(name, column, message.copy_tickets)
    try:
        return [Tier(number) for number in column]
    except ValueError:
        raise _invalid(name, "must be device, host or disk") from None


def _parse_evicting(message: pb.Step) -> dict[int, tuple[int, ...]]:
    tables = cut(message.evicting_slots, message.evicting_counts)
    return {sequence: tuple(slots) for sequence, slots in zip(message.evicting_sequences, tables, strict=True)}


def _parse_table_updates(message: pb.Step) -> list[BlockTableUpdate]:
    entries = cut(message.table_slots, message.table_counts)
    columns = zip(message.table_sequences, message.table_groups, entries, strict=True)
    return [BlockTableUpdate(sequence, group, tuple(slots)) for sequence, group, slots in columns]


def _parse_new(message: pb.NewSequence, layout: Layout) -> NewSequence:
    tables = {table.group: tuple(table.slots) for table in message.block_tables}
    if sorted(tables) != list(range(len(message.block_tables))):
        raise _invalid("new_sequences.block_tables.group", "must be 0, 1, … each once")
    return NewSequence(
        sequence=message.sequence,
        token_ids=tuple(message.token_ids),
        num_prompt_tokens=message.num_prompt_tokens,
        num_computed_tokens=message.num_computed_tokens,
        tables=tuple(tables[group] for group in range(len(tables))),
        sampling=_parse_sampling(message.sampling) if message.HasField("sampling") else Sampling(),
        policy=_parse_policy(message.eviction_policy, layout) if message.HasField("eviction_policy") else None,
        traceparent=message.traceparent,
        continuation=tuple(message.continuation_token_ids),
        adapter_id=message.adapter_id if message.HasField("adapter_id") else None,
    )


def _parse_policy(message: common.EvictionPolicy, layout: Layout) -> Policy | None:
    field = "new_sequences.eviction_policy"
    try:
        return parse(message, layout, field)
    except InvalidField as error:
        raise InvalidStepError(error.message, fields=error.fields) from error


def _parse_sampling(message: pb.SamplingParams) -> Sampling:
    for name, fits, bound in (
        ("temperature", message.temperature >= 0 and math.isfinite(message.temperature), "must be 0 or more"),
        ("top_p", 0 < message.top_p <= 1, "must be more than 0 and at most 1"),
        ("min_p", 0 <= message.min_p < 1, "must be at least 0 and less than 1"),
        ("repetition_penalty", 0.01 <= message.repetition_penalty <= 100, "must be between 0.01 and 100"),
        ("presence_penalty", math.isfinite(message.presence_penalty), "must be a number"),
        ("frequency_penalty", math.isfinite(message.frequency_penalty), "must be a number"),
        ("logit_bias", all(map(math.isfinite, message.logit_bias.values())), "must be numbers"),
        ("bad_token_ids", all(run.token_ids for run in message.bad_token_ids), "must not be empty"),
    ):
        if not fits:
            raise _invalid(f"new_sequences.sampling.{name}", bound)
    return Sampling(
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        min_p=message.min_p,
        repetition_penalty=message.repetition_penalty,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        seed=message.seed,
        stop_token_ids=frozenset(message.stop_token_ids),
        num_logprobs=message.num_logprobs if message.HasField("num_logprobs") else None,
        logit_bias=dict(message.logit_bias),
        min_tokens=message.min_tokens,
        bad_token_ids=tuple(tuple(run.token_ids) for run in message.bad_token_ids),
        allowed_token_ids=tuple(message.allowed_token_ids),
        num_prompt_logprobs=message.num_prompt_logprobs if message.HasField("num_prompt_logprobs") else None,
        grammar=parse_grammar(message.structured_output) if message.HasField("structured_output") else None,
    )


def parse_grammar(message: common.StructuredOutput) -> Grammar:
    """Parses a grammar. Raises InvalidStepError for a message without a form."""
    form = message.WhichOneof("form")
    match form:
        case "choice":
            return Grammar(GrammarKind.CHOICE, json.dumps(list(message.choice.texts)))
        case "structural_tags":
            tags = message.structural_tags
            parts = [
                (trigger, tag.begin, tag.json_schema, tag.end)
                for tag in tags.tags
                for trigger in [next((text for text in tags.triggers if tag.begin.startswith(text)), tag.begin)]
            ]
            return Grammar(GrammarKind.STRUCTURAL_TAGS, json.dumps(parts))
        case None:
            raise _invalid("structured_output", "must have a form")
        case _:
            return Grammar(GrammarKind(form), getattr(message, form))


def _check_columns(name: str, column: Sequence[int], first: Sequence[int]) -> None:
    if len(column) != len(first):
        raise _invalid(name, f"must have {len(first)} entries, has {len(column)}")


def _invalid(field: str, description: str) -> InvalidStepError:
    return InvalidStepError(f"{field} {description}", fields={field: description})


def build_result(output: StepOutput) -> pb.StepResult:
    result = pb.StepResult(
        step=output.number,
        sequences=[token.sequence for token in output.sampled],
        token_ids=[token.token_id for token in output.sampled],
        stopped=[token.stopped for token in output.sampled],
        num_tokens=output.num_tokens,
        evicted_sequences=[each.sequence for each in output.evicted],
        evicted_tokens=[each.tokens for each in output.evicted],
        kept_masses=[-1 if each.mass is None else each.mass for each in output.evicted],
        window_sequences=output.windows.keys(),
        window_tokens=output.windows.values(),
        copied_tickets=output.copied,
        failed_tickets=output.failed,
        num_drafts=output.num_drafts,
        draft_sequences=output.wanted_drafts.keys(),
        draft_tokens=output.wanted_drafts.values(),
        failed_sequences=[token.sequence for token in output.sampled if token.failed],
    )
    for index, token in enumerate(output.sampled):
        if token.logprobs is not None:
            result.logprobs.append(_logprobs(index, token.logprobs))
    for prompt in output.prompt_logprobs:
        logprobs = (_logprobs(position, one) for position, one in enumerate(prompt.logprobs, prompt.position))
        result.prompt_logprobs.add(sequence=prompt.sequence, logprobs=logprobs)
    result.compute_time.FromTimedelta(timedelta(seconds=output.compute_time))
    result.idle_time.FromTimedelta(timedelta(seconds=output.idle_time))
    for tier, into in ((Tier.HOST, "host_block_time"), (Tier.DISK, "disk_block_time")):
        if tier in output.block_times:
            getattr(result, into).FromTimedelta(timedelta(seconds=output.block_times[tier]))
    return result


def _logprobs(index: int, logprobs: Logprobs) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(
        index=index,
        logprob=logprobs.logprob,
        top_token_ids=logprobs.top_ids,
        top_logprobs=logprobs.top_logprobs,
        rank=logprobs.rank,
    )
