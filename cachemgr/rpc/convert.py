"""Converts between messages and the domain's types, one function per message. Nothing is decided here."""

from collections.abc import Iterable
from dataclasses import asdict

from google.protobuf.duration_pb2 import Duration
from google.protobuf.json_format import MessageToDict

from cachemgr import types
from cachemgr.blocks.events import Event
from cachemgr.sequences.sequence import Sequence
from protos.errors import InvalidField
from protos.kvcache.v1 import kvcache_pb2 as pb
from protos.kvcommon.eviction_message import EvictionPolicyRequest, message_of
from protos.kvcommon.tokens import pack, unpack
from protos.kvcommon.v1 import kvcommon_pb2 as common
from protos.rpc.durations import duration, seconds

# Enum values are given by name; the generated types accept names as well as numbers.
KINDS = {kind: f"EVENT_KIND_{kind.name}" for kind in types.EventKind}
TIERS = {tier: f"TIER_{tier.name}" for tier in types.TierKind}
_TIERS = {pb.Tier.Value(name): tier for tier, name in TIERS.items()}
CAUSES = {cause: f"REMOVAL_CAUSE_{cause.name if cause else 'UNSPECIFIED'}" for cause in types.RemovalCause}


def executor_spec(request: pb.RegisterExecutorRequest) -> types.ExecutorSpec:
    return types.ExecutorSpec(
        executor_id=request.executor_id,
        executor_epoch=request.executor_epoch,
        model=request.model,
        model_fingerprint=request.model_fingerprint,
        block_size=request.block_size,
        pools=[_pool_spec(pool) for pool in request.pools],
        last_write_steps=[list(pool.last_write_steps) for pool in request.pools],
        memory_bytes=request.memory_bytes if request.HasField("memory_bytes") else None,
        plain_rotary=request.plain_rotary,
        host_generations=[list(pool.host_generations) for pool in request.pools],
        disk_generations=[list(pool.disk_generations) for pool in request.pools],
        weight_version=request.weight_version,
        steps_manager_epoch=request.steps_manager_epoch,
    )


def _pool_spec(pool: pb.PoolSpec) -> types.PoolSpec:
    return types.PoolSpec(
        group=pool.group,
        num_blocks=pool.num_blocks,
        attention_window=pool.attention_window if pool.HasField("attention_window") else None,
        num_layers=pool.num_layers,
        num_kv_heads=pool.num_kv_heads,
        head_dim=pool.head_dim,
        dtype=pool.dtype,
        block_bytes=pool.block_bytes,
        host_blocks=pool.host_blocks,
        disk_blocks=pool.disk_blocks,
        share_blocks=pool.share_blocks,
    )


def admit_request(request: pb.AdmitSequenceRequest) -> types.AdmitRequest:
    lowest = tier("lowest_tier", request.lowest_tier)
    return types.AdmitRequest(
        sequence_id=request.sequence_id,
        scheduler_id=request.scheduler_id,
        scheduler_epoch=request.scheduler_epoch,
        executor_id=request.executor_id,
        # Via a list, which protobuf makes faster than it yields single numbers.
        token_ids=pack(list(request.token_ids)),
        salt=request.salt if request.HasField("salt") else None,
        adapter_id=request.adapter_id if request.HasField("adapter_id") else None,
        session_id=request.session_id if request.HasField("session_id") else None,
        request_id=request.request_id if request.HasField("request_id") else None,
        num_prompt_tokens=request.num_prompt_tokens if request.HasField("num_prompt_tokens") else None,
        tenant_id=request.tenant_id if request.HasField("tenant_id") else None,
        extra_keys=extra_keys(request.extra_keys),
        retention=_retention(request.retention),
        hints=hints(request.hints) if request.HasField("hints") else None,
        eviction_policy=EvictionPolicyRequest.of(request.eviction_policy)
        if request.HasField("eviction_policy")
        else None,
        no_read=request.no_read,
        no_store=request.no_store,
        lowest_tier=types.TierKind.DISK if lowest is None else lowest,
        max_continuation=request.max_continuation_tokens,
        explain_miss=request.explain_miss,
        store_tokens=request.store_tokens if request.HasField("store_tokens") else None,
    )


def tier(field: str, number: int) -> types.TierKind | None:
    """Returns a tier; None if unspecified. Raises InvalidField for an unknown number."""
    if number and number not in _TIERS:
        raise InvalidField(field, "is not a known tier")
    return _TIERS.get(number)


def extra_keys(keys: Iterable[pb.ExtraKey]) -> tuple[types.ExtraKey, ...]:
    return tuple(types.ExtraKey(key.start, key.length, key.digest) for key in keys)


def _retention(config: pb.RetentionConfig) -> types.Retention:
    has_priority = config.HasField("decode_retention_priority")
    has_duration = config.HasField("decode_retention_duration")
    return types.Retention(
        ranges=tuple(
            types.RetentionRange(
                part.start,
                part.end if part.HasField("end") else None,
                part.retention_priority,
                seconds(part.retention_duration) if part.HasField("retention_duration") else None,
            )
            for part in config.ranges
        ),
        decode_priority=config.decode_retention_priority if has_priority else None,
        decode_duration=seconds(config.decode_retention_duration) if has_duration else None,
    )


def admit_response(manager_epoch: int, admission: types.Admission) -> pb.AdmitSequenceResponse:
    return pb.AdmitSequenceResponse(
        manager_epoch=manager_epoch,
        admitted=admission.admitted,
        missing_blocks=admission.missing_blocks,
        full_account=_account(admission.full_account),
        sequence_handle=admission.sequence_handle,
        cached_tokens=admission.cached_tokens,
        wait_for_handle=admission.wait_for_handle,
        capacity_tokens=admission.capacity_tokens,
        block_tables=_tables(admission.block_tables),
        transfers=transfers(admission.transfers),
        receipts=[receipt(given) for given in admission.receipts],
        hint_answers=[hint_answer(answer) for answer in admission.hint_answers],
        eviction_policy=None if admission.eviction_policy is None else message_of(admission.eviction_policy),
        continuation_token_ids=admission.continuation,
        miss=None if admission.miss is None else miss(admission.miss),
        store_tokens=admission.store_tokens,
    )


def miss(found: types.Miss) -> common.PrefixMiss:
    return common.PrefixMiss(
        cause=f"MISS_CAUSE_{found.cause.name}",
        removed_ago=None if found.removed_ago is None else duration(found.removed_ago),
        retention_priority=found.priority,
        for_own_request=found.for_own,
        for_id=found.for_sequence_id,
        tier="" if found.tier is None else found.tier.name.lower(),
    )


def _account(key: types.AccountKey | None) -> pb.QuotaAccount | None:
    if key is None:
        return None
    kind, name = key
    return pb.QuotaAccount(tenant_id=name) if kind == "tenant_id" else pb.QuotaAccount(salt=name)


def fork_response(admission: types.Admission) -> pb.ForkSequenceResponse:
    return pb.ForkSequenceResponse(
        admitted=admission.admitted,
        missing_blocks=admission.missing_blocks,
        full_account=_account(admission.full_account),
        sequence_handle=admission.sequence_handle,
        cached_tokens=admission.cached_tokens,
        block_tables=_tables(admission.block_tables),
        transfers=transfers(admission.transfers),
    )


def _tables(tables: Iterable[types.Table]) -> list[pb.BlockTable]:
    return [pb.BlockTable(group=table.group, slots=table.slots) for table in tables]


def transfers(opened: Iterable[types.Transfer]) -> list[pb.Transfer]:
    return [
        pb.Transfer(
            ticket=transfer.ticket,
            group=transfer.group,
            source_tier=TIERS[transfer.source_tier],
            source_slot=transfer.source_slot,
            target_tier=TIERS[transfer.target_tier],
            target_slot=transfer.target_slot,
            num_tokens=transfer.num_tokens,
            bytes=transfer.num_bytes,
        )
        for transfer in opened
    ]


def sync_request(request: pb.SyncSequencesRequest) -> types.SyncRequest:
    return types.SyncRequest(
        scheduler_id=request.scheduler_id,
        scheduler_epoch=request.scheduler_epoch,
        manager_epoch=request.manager_epoch,
        sync_number=request.sync_number,
        step=request.step,
        handles=list(request.handles),
        computed_tokens=list(request.computed_tokens),
        new_token_counts=list(request.new_token_counts),
        new_token_ids=list(request.new_token_ids),
        released_handles=list(request.released_handles),
        trimmed_handles=list(request.trimmed_handles),
        trimmed_capacity_tokens=list(request.trimmed_capacity_tokens),
        cancelled_tickets=list(request.cancelled_tickets),
        evicting_handles=list(request.evicting_handles),
        evicted_handles=list(request.evicted_handles),
        computed_tokens_before_eviction=list(request.computed_tokens_before_eviction),
        evicting_window_tokens=list(request.evicting_window_tokens),
        window_handles=list(request.window_handles),
        window_tokens=list(request.window_tokens),
    )


def sync_response(manager_epoch: int, answer: types.SyncAnswer, lease: Duration) -> pb.SyncSequencesResponse:
    return pb.SyncSequencesResponse(
        manager_epoch=manager_epoch,
        extended_handles=answer.extended_handles,
        extended_groups=answer.extended_groups,
        extended_counts=answer.extended_counts,
        extended_slots=answer.extended_slots,
        void_handles=answer.void_handles,
        unknown_handles=answer.unknown_handles,
        missing_blocks=answer.missing_blocks,
        free_blocks=answer.free_blocks,
        total_blocks=answer.total_blocks,
        transfers=transfers(answer.transfers),
        lease_duration=lease,
        evicting_handles=answer.evicting_handles,
        evicting_counts=answer.evicting_counts,
        evicting_slots=answer.evicting_slots,
        evicting_window_tokens=answer.evicting_window_tokens,
        window_handles=answer.window_handles,
        window_tokens=answer.window_tokens,
    )


def pool(view: types.PoolView) -> pb.Pool:
    return pb.Pool(
        pool_id=view.pool_id,
        # The fields have the same names as the fields of the message.
        spec=pb.PoolSpec(**asdict(view.spec)),
        block_size=view.block_size,
        total_blocks=view.total_blocks,
        free_blocks=view.free_blocks,
        used_blocks=view.used_blocks,
        cached_blocks=view.cached_blocks,
        evicted_blocks=view.evicted_blocks,
        queried_tokens=view.queried_tokens,
        hit_tokens=view.hit_tokens,
        lower_tiers=[
            pb.TierUsage(
                tier=TIERS[usage.tier],
                total_blocks=usage.total_blocks,
                free_blocks=usage.free_blocks,
                used_blocks=usage.used_blocks,
                cached_blocks=usage.cached_blocks,
                copy_blocks=usage.copy_blocks,
            )
            for usage in view.lower_tiers
        ],
        etag=view.etag,
    )


def block(view: types.BlockView, *, token_ids: bool = False) -> pb.Block:
    """Converts a block; with its token ids only if requested."""
    return pb.Block(
        pool_id=view.pool_id,
        slot=view.slot,
        tier=TIERS[view.tier],
        key=view.key,
        parent_key=view.parent_key,
        num_tokens=view.num_tokens,
        references=view.references,
        retention_priority=view.priority,
        depth=view.depth,
        salt=None if view.scope is None else view.scope.salt,
        adapter_id=None if view.scope is None else view.scope.adapter_id,
        tenant_id=None if view.scope is None else view.scope.tenant_id,
        session_id=None if view.scope is None else view.scope.session_id,
        token_ids=unpack(view.tokens) if token_ids else (),
        hits=view.hits,
        last_use_age=None if view.idle is None else duration(view.idle),
    )


def sequence(live: Sequence) -> pb.Sequence:
    return pb.Sequence(
        sequence_id=live.sequence_id,
        sequence_handle=live.handle,
        scheduler_id=live.scheduler.scheduler_id,
        executor_id=live.executor.executor_id,
        num_tokens=len(live.tokens),
        computed_tokens=live.computed,
        cached_tokens=live.cached_tokens,
        capacity_tokens=live.capacity,
        num_blocks=live.blocks_held,
        salt=live.scope.salt,
        tenant_id=live.scope.tenant_id,
        session_id=live.scope.session_id,
        eviction_policy=None if live.eviction is None else message_of(live.eviction.policy),
        evicting=live.has_evicted_tokens,
        window_tokens=None if live.eviction is None else live.eviction.window,
        granted_blocks=0 if live.eviction is None else live.eviction.granted_blocks,
    )


def lease(view: types.LeaseView) -> pb.Lease:
    return pb.Lease(
        holder=view.holder,
        retention_priority=view.priority,
        remaining_duration=None if view.remaining is None else duration(view.remaining),
        started=view.started,
    )


def event(happened: Event, *, snapshot: bool, token_ids: bool = False) -> pb.Event:
    if happened.executor is not None:
        return pb.Event(
            event_number=happened.number,
            snapshot=snapshot,
            kind=KINDS[happened.kind],
            executor=executor(happened.executor, lost=happened.kind is types.EventKind.EXECUTOR_LOST),
        )
    created = happened.kind is types.EventKind.CREATED
    return pb.Event(
        event_number=happened.number,
        snapshot=snapshot,
        kind=KINDS[happened.kind],
        block=pb.Block(pool_id=happened.block.pool_id) if created else block(happened.block, token_ids=token_ids),
        removal_cause=CAUSES[happened.cause],
        lease=None if happened.lease is None else lease(happened.lease),
        for_sequence_id=happened.for_sequence_id,
    )


def executor(spec: types.ExecutorSpec, *, lost: bool = False) -> pb.Executor:
    """Converts an executor, as watchers see it."""
    if lost:
        return pb.Executor(executor_id=spec.executor_id, executor_epoch=spec.executor_epoch)
    return pb.Executor(
        executor_id=spec.executor_id,
        executor_epoch=spec.executor_epoch,
        model=spec.model,
        model_fingerprint=spec.model_fingerprint,
        block_size=spec.block_size,
        # The fields have the same names as the fields of the message.
        pools=[pb.PoolSpec(**asdict(pool)) for pool in spec.pools],
        weight_version=spec.weight_version,
    )


def receipt(given: types.Receipt) -> common.RetentionReceipt:
    return common.RetentionReceipt(
        request=given.request,
        outcome=f"OUTCOME_{given.outcome.name}",
        reason=given.reason,
        retention_priority=given.priority,
        retention_duration=None if given.duration is None else duration(given.duration),
        num_blocks=given.num_blocks,
    )


def hints(message: common.KvHints) -> types.Hints:
    """Converts the envelope. Raises InvalidField for a payload that is not JSON."""
    return types.Hints(
        message.protocol_version,
        message.message_id,
        tuple(_action(action, f"hints.actions[{index}]") for index, action in enumerate(message.actions)),
    )


def _action(message: common.HintAction, path: str) -> types.HintAction:
    try:
        payload = MessageToDict(message.payload)
    except ValueError as error:
        raise InvalidField(f"{path}.payload", "must not have numbers that JSON does not have") from error
    return types.HintAction(message.action_id, message.action_type, message.action_version, payload)


def hint_answer(answer: types.HintAnswer) -> common.HintAnswer:
    return common.HintAnswer(
        action_id=answer.action_id,
        outcome=f"HINT_OUTCOME_{answer.outcome.name}",
        detail=answer.detail,
        num_blocks=answer.num_blocks,
    )
