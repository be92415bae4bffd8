"""A cache manager and its services in this process, called by method and request, with or without a log."""

from functools import partial
from inspect import isgeneratorfunction
from typing import Any, BinaryIO

from google.protobuf.message import Message

from cachemgr.manager import CacheManager
from cachemgr.oplog.writer import OperationLog
from cachemgr.rpc import convert
from cachemgr.rpc.admin_service import CacheAdminService
from cachemgr.rpc.data_service import CacheManagerService
from cachemgr.rpc.event_feed import EventFeed
from cachemgr.rpc.mutations import ManagerClock, Mutations, ServiceContext, handlers
from protos.kvcache.v1 import kvcache_pb2 as pb


class DirectCalls:
    """Carries out each call at once and to its last step, as the servicers do."""

    def __init__(self, manager: CacheManager, clock: ManagerClock, file: BinaryIO | None = None) -> None:
        """`file` takes the log."""
        self.manager = manager
        log = None if file is None else OperationLog(file, clock.now, manager.epoch, manager.config)
        self.mutations = Mutations(manager, clock, log)
        self.context = ServiceContext(self.mutations, EventFeed(manager.queries))
        self.data, self.admin = CacheManagerService(self.context), CacheAdminService(self.context)
        self.handlers = handlers(self.data) | handlers(self.admin)

    def run(self, method: str, request: Message) -> Any:
        """The answer. Raises ServiceError."""
        if isinstance(request, pb.RegisterExecutorRequest):
            return self.register(request)
        call = partial(self.handlers[method], request)
        if not isgeneratorfunction(call):
            return self.mutations.run(method, request, call)
        self.mutations.begin(method, request, call)
        while not self.mutations.go_on():
            pass
        return self.mutations.answer

    async def run_in_slices(self, method: str, request: Message) -> Any:
        """Like `run`, for a long call: other calls are carried out between its slices."""
        return await self.mutations.run_in_slices(method, request, partial(self.handlers[method], request))

    def register(self, request: pb.RegisterExecutorRequest, *, later: bool = False) -> pb.RegisterExecutorResponse:
        """Like RegisterExecutor without a store; with `later`, stored blocks come by `restore_blocks`."""
        return self.data.register(request, convert.executor_spec(request), later=later)
