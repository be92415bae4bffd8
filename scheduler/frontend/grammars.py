"""Has the forms of outputs compiled before their requests are queued for blocks."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from hashlib import sha256

import grpc
import structlog

from protos.execution.v1 import execution_pb2
from protos.execution.v1 import execution_pb2_grpc as execution_rpc
from protos.kvcommon.v1 import kvcommon_pb2 as common
from protos.rpc.errors import InvalidField, PassedOnError, from_rpc_error

# Most forms that count as compiled; the executor keeps twice as many forms, by LRU.
MAX_REMEMBERED = 128
# The largest grammars take a second.
COMPILE_SECONDS = 30.0
RETRY_SECONDS = 0.5

log = structlog.get_logger()


class ExecutorGrammars:
    """Has the executor compile forms, so that an error affects only its request, and no step waits.

    Requests wait for as long as the executor is away. The executor is not asked again for forms that it still has.
    """

    def __init__(self, stub: execution_rpc.ExecutorServiceAsyncStub) -> None:
        self._stub = stub
        # Digests of compiled forms, with the last used form at the end.
        self._compiled: OrderedDict[bytes, None] = OrderedDict()

    def forget(self) -> None:
        """Forgets the compiled forms, because the executor has lost them."""
        # Calls in flight still write to the old dictionary.
        self._compiled = OrderedDict()

    async def compile(self, form: common.StructuredOutput, field: str) -> None:
        """Returns once the form is compiled. field: names the form in errors.

        Raises InvalidField if the form cannot be compiled, and PassedOnError if the executor fails for another reason.
        """
        digest = sha256(form.SerializeToString(deterministic=True)).digest()
        if digest in self._compiled:
            self._compiled.move_to_end(digest)
            return
        request, compiled = execution_pb2.CompileGrammarRequest(structured_output=form), self._compiled
        while True:
            try:
                await self._stub.CompileGrammar(request, timeout=COMPILE_SECONDS)
                compiled[digest] = None
                if len(compiled) > MAX_REMEMBERED:
                    compiled.popitem(last=False)
                return
            except grpc.aio.AioRpcError as failure:
                error = from_rpc_error(failure)
            if error.code == grpc.StatusCode.INVALID_ARGUMENT:
                raise InvalidField(field, f"cannot be used: {error.message}")
            if error.code != grpc.StatusCode.UNAVAILABLE:
                raise PassedOnError(error)
            log.info("waiting for the executor to compile a grammar", cause=str(error))
            await asyncio.sleep(RETRY_SECONDS)
