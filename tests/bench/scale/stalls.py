"""How long single calls keep the cache manager's event loop from everybody else."""

import time
from array import array
from collections.abc import Iterator

from cachemgr.api import Admission, AdmitRequest, ExecutorSpec, ManagerConfig, PoolSpec, SyncRequest
from cachemgr.manager import CacheManager
from tests.bench.scale.row import Row

BLOCK = 16
LONG_PROMPT_TOKENS = 131_072


class Cache:
    """A manager with one executor and one scheduler, and prompts that run one after the other."""

    def __init__(self, blocks: int, host_blocks: int = 0) -> None:
        config = ManagerConfig(capacity_ahead_tokens=0, free_watermark=0.0)
        self.manager = CacheManager(1, lambda: 0.0, config)
        pools = [PoolSpec(0, blocks, host_blocks=host_blocks)]
        self.manager.register_executor(ExecutorSpec("e", 1, "m", b"f" * 32, BLOCK, pools))
        self.manager.register_scheduler("s", 1)
        self._syncs = 0

    def run(self, first: int, tokens: int, **options: object) -> tuple[Admission, float]:
        """Computes and releases a prompt of consecutive ids; its admission, and that one's process time."""
        request = AdmitRequest(f"q{self._syncs}", "s", 1, "e", array("I", range(first, first + tokens)), **options)
        begun = time.process_time()
        admission = self.manager.admit(request)
        seconds = time.process_time() - begun
        assert admission.admitted
        self.manager.confirm_transfers("e", 1, [copy.ticket for copy in admission.transfers], [])
        self._syncs += 1
        handles = [admission.sequence_handle]
        done = SyncRequest("s", 1, 1, self._syncs, self._syncs, handles, [tokens], [0], [], released_handles=handles)
        self.manager.sync(done)
        return admission, seconds


def rows(_blocks: int) -> Iterator[Row]:
    """The rows of this module."""
    yield from long_prompts()


def long_prompts() -> Iterator[Row]:
    """Admissions of a prompt that takes the whole device, without and with a full host tier."""
    count = LONG_PROMPT_TOKENS // BLOCK
    for host in (0, count):
        cache = Cache(count + 1, host)
        for first in (0, 1_000_000):
            cache.run(first, LONG_PROMPT_TOKENS)
        fresh, seconds = cache.run(2_000_000, LONG_PROMPT_TOKENS)
        beside = "beside a full host tier" if host else "without a host tier"
        yield Row(f"admit {LONG_PROMPT_TOKENS:,} new tokens {beside}", seconds * 1e3, "ms", 100)
        if host:
            yield Row("blocks that it offloads", len(fresh.transfers), "blocks")
            _, seconds = cache.run(1_000_000, LONG_PROMPT_TOKENS)
            yield Row(f"admit {LONG_PROMPT_TOKENS:,} tokens from the host tier", seconds * 1e3, "ms")
