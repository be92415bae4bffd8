"""The gRPC services: parse, call the manager, convert. Whatever a manager's method raises reaches the caller."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from google.protobuf.duration_pb2 import Duration

from cachemgr import convert, paging
from cachemgr.errors import SchedulerFirstError
from cachemgr.feed import EventFeed
from cachemgr.manager import CacheManager
from cachemgr.store import IndexStore
from protos.kvcache.v1 import kvcache_pb2 as pb
from protos.kvcache.v1 import kvcache_pb2_grpc as pb_grpc
from protos.rpc.errors import InvalidField

# gRPC hands every method its context, of which nothing is needed here.
# ruff: noqa: N802, ARG002


@dataclass(frozen=True)
class Domain:
    """What all services share."""

    manager: CacheManager
    store: IndexStore
    feed: EventFeed

    @property
    def lease(self) -> Duration:
        """How soon executors and schedulers must be heard of again."""
        return convert.duration(self.manager.config.lease_seconds)


class CacheManagerService(pb_grpc.CacheManagerServiceServicer):
    """The data plane. Only a registration ever waits for Redis."""

    def __init__(self, domain: Domain) -> None:
        self._domain = domain
        self._manager = domain.manager
        # The lease never changes, and a sync should not build it every time.
        self._lease = domain.lease

    async def RegisterExecutor(self, request: pb.RegisterExecutorRequest, context: Any) -> pb.RegisterExecutorResponse:
        """Brings back what the store remembers of this epoch, when the manager itself does not."""
        domain = self._domain
        spec = convert.executor_spec(request)
        known = self._manager.knows_executor(spec.executor_id, spec.executor_epoch)
        # Asked before the wait: the request tells what was written up to now, and a scheduler that comes meanwhile may
        # have given up steps that wrote after it.
        scheduler_came = self._manager.scheduler_came
        remembered = None if known else await domain.store.load(spec.executor_id, spec.executor_epoch)
        if remembered and not scheduler_came:
            raise SchedulerFirstError
        restored = self._manager.register_executor(spec, remembered or ())
        if not known and remembered is None:
            domain.store.replace(spec.executor_id, spec.executor_epoch)
        domain.feed.ring()
        return pb.RegisterExecutorResponse(
            manager_epoch=self._manager.epoch, lease_duration=self._lease, restored_blocks=restored
        )

    async def RenewExecutor(self, request: pb.RenewExecutorRequest, context: Any) -> pb.RenewExecutorResponse:
        """Keeps a lease."""
        self._manager.renew_executor(request.executor_id, request.executor_epoch, request.manager_epoch)
        return pb.RenewExecutorResponse(manager_epoch=self._manager.epoch, lease_duration=self._lease)

    async def RegisterScheduler(
        self, request: pb.RegisterSchedulerRequest, context: Any
    ) -> pb.RegisterSchedulerResponse:
        """Frees what an older epoch held."""
        self._manager.register_scheduler(request.scheduler_id, request.scheduler_epoch)
        self._domain.feed.ring()
        return pb.RegisterSchedulerResponse(manager_epoch=self._manager.epoch, lease_duration=self._lease)

    async def AdmitSequence(self, request: pb.AdmitSequenceRequest, context: Any) -> pb.AdmitSequenceResponse:
        """Matches, claims and allocates."""
        admission = self._manager.admit(convert.admit_request(request))
        self._domain.feed.ring()
        return convert.admit_response(self._manager.epoch, admission)

    async def SyncSequences(self, request: pb.SyncSequencesRequest, context: Any) -> pb.SyncSequencesResponse:
        """Takes progress, gives capacity."""
        answer = self._manager.sync(convert.sync_request(request))
        self._domain.feed.ring()
        return convert.sync_response(self._manager.epoch, answer, self._lease)

    async def ExtendSequence(self, request: pb.ExtendSequenceRequest, context: Any) -> pb.ExtendSequenceResponse:
        """Grows one sequence."""
        extension = self._manager.extend(request.sequence_id, request.capacity_tokens)
        self._domain.feed.ring()
        return convert.extend_response(extension)

    async def TruncateSequence(self, request: pb.TruncateSequenceRequest, context: Any) -> pb.TruncateSequenceResponse:
        """Forgets tokens."""
        freed = self._manager.truncate(request.sequence_id, request.num_tokens)
        self._domain.feed.ring()
        return pb.TruncateSequenceResponse(found=freed.found, freed_blocks=freed.freed_blocks)

    async def ForkSequence(self, request: pb.ForkSequenceRequest, context: Any) -> pb.ForkSequenceResponse:
        """Shares a sequence's blocks with a second one."""
        admission = self._manager.fork(request.parent_sequence_id, request.sequence_id)
        self._domain.feed.ring()
        return convert.fork_response(admission)

    async def HoldSequence(self, request: pb.HoldSequenceRequest, context: Any) -> pb.HoldSequenceResponse:
        """Keeps blocks beyond their sequence."""
        seconds = convert.seconds(request.duration)
        held = self._manager.hold(request.sequence_id, request.owner, seconds)
        return pb.HoldSequenceResponse(held_blocks=held)

    async def ReleaseSequence(self, request: pb.ReleaseSequenceRequest, context: Any) -> pb.ReleaseSequenceResponse:
        """Gives blocks back."""
        freed = self._manager.release(request.sequence_id)
        self._domain.feed.ring()
        return pb.ReleaseSequenceResponse(found=freed.found, freed_blocks=freed.freed_blocks)

    async def ConfirmTransfers(self, request: pb.ConfirmTransfersRequest, context: Any) -> pb.ConfirmTransfersResponse:
        """Ends copies."""
        unknown = self._manager.confirm_transfers(
            request.executor_id, request.executor_epoch, list(request.tickets), list(request.failed_tickets)
        )
        self._domain.feed.ring()
        return pb.ConfirmTransfersResponse(unknown_tickets=unknown)


class CacheAdminService(pb_grpc.CacheAdminServiceServicer):
    """The operator's view and hand."""

    def __init__(self, domain: Domain) -> None:
        self._manager = domain.manager
        self._feed = domain.feed

    async def CheckPool(self, request: pb.CheckPoolRequest, context: Any) -> pb.CheckPoolResponse:
        """Recounts."""
        found = self._manager.check_pool(request.pool_id)
        pools = [self._manager.pool(request.pool_id)] if request.pool_id else self._manager.pools()
        return pb.CheckPoolResponse(
            violations=[pb.PoolViolation(pool_id=one.pool_id, slot=one.slot, message=one.message) for one in found],
            pools=[convert.pool(view) for view in pools],
        )

    async def ListPools(self, request: pb.ListPoolsRequest, context: Any) -> pb.ListPoolsResponse:
        """Pools by name."""
        limit = paging.page_limit(request.page_size)
        after = paging.decode_token("pools", request.page_token)
        rest = (view for view in self._manager.pools() if view.pool_id > after)
        page, token = paging.cut(rest, limit, "pools", lambda view: view.pool_id)
        return pb.ListPoolsResponse(pools=[convert.pool(view) for view in page], next_page_token=token)

    async def GetPool(self, request: pb.GetPoolRequest, context: Any) -> pb.GetPoolResponse:
        """One pool."""
        return pb.GetPoolResponse(pool=convert.pool(self._manager.pool(_required_pool(request.pool_id))))

    async def ListBlocks(self, request: pb.ListBlocksRequest, context: Any) -> pb.ListBlocksResponse:
        """Blocks of a pool by slot."""
        limit = paging.page_limit(request.page_size)
        after = paging.decode_number("blocks", request.page_token)
        rest = self._manager.blocks(_required_pool(request.pool_id), after)
        page, token = paging.cut(rest, limit, "blocks", lambda view: view.slot)
        return pb.ListBlocksResponse(blocks=[convert.block(view) for view in page], next_page_token=token)

    async def ListSequences(self, request: pb.ListSequencesRequest, context: Any) -> pb.ListSequencesResponse:
        """Sequences by handle."""
        limit = paging.page_limit(request.page_size)
        after = paging.decode_number("sequences", request.page_token)
        rest = self._manager.sequences(after)
        page, token = paging.cut(rest, limit, "sequences", lambda view: view.sequence_handle)
        return pb.ListSequencesResponse(sequences=[convert.sequence(view) for view in page], next_page_token=token)

    async def PurgeBlocks(self, request: pb.PurgeBlocksRequest, context: Any) -> pb.PurgeBlocksResponse:
        """Drops cached blocks."""
        purged = self._manager.purge(convert.block_filter(request.filter), validate_only=request.validate_only)
        self._feed.ring()
        return pb.PurgeBlocksResponse(purged_blocks=purged.purged_blocks, used_blocks=purged.used_blocks)


def _required_pool(pool_id: str) -> str:
    if not pool_id:
        raise InvalidField("pool_id", "must name a pool as ListPools gives it")
    return pool_id


class CacheEventService(pb_grpc.CacheEventServiceServicer):
    """List, then watch."""

    def __init__(self, domain: Domain) -> None:
        self._manager = domain.manager
        self._feed = domain.feed

    async def WatchEvents(self, request: pb.WatchEventsRequest, context: Any) -> AsyncIterator[pb.WatchEventsResponse]:
        """A snapshot unless told where to continue, then every event. A consumer too slow gets OUT_OF_RANGE."""
        if request.HasField("after_event_number"):
            number = request.after_event_number
        else:
            snapshot = self._manager.snapshot()
            number = snapshot.number
            # Taken whole, before the first await: calls served in between change the cache.
            for event in list(snapshot.events):
                yield convert.event(event, snapshot=True)
        while True:
            for event in self._manager.events_after(number):
                yield convert.event(event, snapshot=False)
                number = event.number
            await self._feed.wait_for_events(number)
