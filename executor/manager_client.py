"""The executor's side of its life with the cache manager: registration, lease, confirmed copies."""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import grpc
import structlog

from executor.kv_pool import KvPools
from protos.kvcache.v1 import kvcache_pb2 as kv
from protos.kvcache.v1 import kvcache_pb2_grpc as kv_rpc
from protos.rpc.errors import from_rpc_error

log = structlog.get_logger()

CALL_SECONDS = 5.0
# A restarted manager knows nothing of us until we come back, so we look often.
MAX_RENEWAL_SECONDS = 0.5
FIRST_BACKOFF_SECONDS = 0.1
MAX_BACKOFF_SECONDS = 0.5


@dataclass(frozen=True)
class Announcement:
    """What the manager is told about an executor."""

    executor_id: str
    epoch: int
    model: str
    fingerprint: bytes
    plain_rotary: bool

    def request(self, pools: KvPools, *, again: bool) -> kv.RegisterExecutorRequest:
        """`again`: with the last write of every slot, so that the manager can tell what is still there."""
        return kv.RegisterExecutorRequest(
            executor_id=self.executor_id,
            executor_epoch=self.epoch,
            model=self.model,
            model_fingerprint=self.fingerprint,
            block_size=pools.block_size,
            plain_rotary=self.plain_rotary,
            pools=[
                kv.PoolSpec(
                    group=number,
                    num_blocks=pool.num_blocks,
                    attention_window=pool.group.shape.window,
                    num_layers=len(pool.group.layers),
                    num_kv_heads=pool.group.shape.kv_heads,
                    head_dim=pool.group.shape.head_dim,
                    dtype=str(pool.k.dtype).removeprefix("torch."),
                    block_bytes=pool.block_bytes,
                    last_write_steps=pool.last_write_steps[1:].tolist() if again else (),
                )
                for number, pool in enumerate(pools.pools)
            ],
        )


class ManagerClient:
    """Two loops for the life of the process. All methods are called on the asyncio loop."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        announcement: Announcement,
        pools: KvPools,
        zero: Callable[[tuple[tuple[int, int, int], ...]], None],
        on_registered: Callable[[], None] = lambda: None,
    ) -> None:
        self._stub: kv_rpc.CacheManagerServiceAsyncStub = kv_rpc.CacheManagerServiceStub(channel)
        self._announcement = announcement
        self._pools = pools
        self._zero = zero
        self._on_registered = on_registered
        # The newest ticket that came with a renewal; their numbers only grow, also from one manager to the next.
        self._newest_ticket = 0
        self._registered = asyncio.Event()
        self._manager_epoch = 0
        self._renewal_seconds = MAX_RENEWAL_SECONDS
        self._done: list[int] = []
        self._failed: list[int] = []
        self._to_confirm = asyncio.Event()

    async def run(self) -> None:
        """Registers and confirms until it is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._stay_registered())
            tasks.create_task(self._confirm_all())

    def confirm(self, done: tuple[int, ...], failed: tuple[int, ...]) -> None:
        """Queues tickets of finished and of failed copies."""
        self._done.extend(done)
        self._failed.extend(failed)
        self._to_confirm.set()

    async def _stay_registered(self) -> None:
        again = False
        while True:
            await self._register(again)
            again = True
            self._registered.set()
            self._on_registered()
            await self._renew()
            self._registered.clear()

    async def _register(self, again: bool) -> None:
        backoff = FIRST_BACKOFF_SECONDS
        while True:
            try:
                # Waits for no connection: each failure is logged, so that a person sees what is missing.
                answer = await self._stub.RegisterExecutor(
                    self._announcement.request(self._pools, again=again), timeout=CALL_SECONDS
                )
            except grpc.aio.AioRpcError as error:
                log.info("waiting for the cache manager", cause=str(from_rpc_error(error)))
                await asyncio.sleep(backoff)
                backoff = min(2 * backoff, MAX_BACKOFF_SECONDS)
                continue
            self._manager_epoch = answer.manager_epoch
            self._set_lease(answer.lease_duration.ToTimedelta().total_seconds())
            log.info("registered with the cache manager", restored_blocks=answer.restored_blocks, again=again)
            return

    async def _renew(self) -> None:
        """Returns when the manager asks for a new registration or is another one."""
        request = kv.RenewExecutorRequest(
            executor_id=self._announcement.executor_id,
            executor_epoch=self._announcement.epoch,
            manager_epoch=self._manager_epoch,
        )
        while True:
            await asyncio.sleep(self._renewal_seconds)
            try:
                answer = await self._stub.RenewExecutor(request, timeout=CALL_SECONDS)
            except grpc.aio.AioRpcError as error:
                if error.code() == grpc.StatusCode.FAILED_PRECONDITION:
                    log.info("the cache manager wants to know us again", cause=str(from_rpc_error(error)))
                    return
                log.warning("lease not renewed", cause=str(from_rpc_error(error)))
                continue
            if answer.manager_epoch != self._manager_epoch:
                return
            self._set_lease(answer.lease_duration.ToTimedelta().total_seconds())
            self._take(answer.transfers)

    def _take(self, transfers: Iterable[kv.Transfer]) -> None:
        """Begins what the manager itself asks for, once: it repeats itself until it has the answer."""
        fresh = [transfer for transfer in transfers if transfer.ticket > self._newest_ticket]
        self._newest_ticket = max((transfer.ticket for transfer in fresh), default=self._newest_ticket)
        slots = [transfer for transfer in fresh if not transfer.source_slot and transfer.target_tier == kv.TIER_DEVICE]
        if slots:
            self._zero(tuple((transfer.ticket, transfer.group, transfer.target_slot) for transfer in slots))
        others = tuple(transfer.ticket for transfer in fresh if transfer not in slots)
        if others:
            # This executor has announced no lower tier.
            self.confirm((), others)

    def _set_lease(self, seconds: float) -> None:
        self._renewal_seconds = min(seconds / 3, MAX_RENEWAL_SECONDS) if seconds > 0 else MAX_RENEWAL_SECONDS

    async def _confirm_all(self) -> None:
        backoff = FIRST_BACKOFF_SECONDS
        while True:
            await self._to_confirm.wait()
            await self._registered.wait()
            done, failed = len(self._done), len(self._failed)
            request = kv.ConfirmTransfersRequest(
                executor_id=self._announcement.executor_id,
                executor_epoch=self._announcement.epoch,
                tickets=self._done[:done],
                failed_tickets=self._failed[:failed],
            )
            try:
                await self._stub.ConfirmTransfers(request, timeout=CALL_SECONDS)
            except grpc.aio.AioRpcError as error:
                log.warning("copies not confirmed", count=done + failed, cause=str(from_rpc_error(error)))
                await asyncio.sleep(backoff)
                backoff = min(2 * backoff, MAX_BACKOFF_SECONDS)
                continue
            backoff = FIRST_BACKOFF_SECONDS
            del self._done[:done], self._failed[:failed]
            if not self._done and not self._failed:
                self._to_confirm.clear()
