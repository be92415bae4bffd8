"""The manager's process and Redis die and stand still at random; nothing that is answered or stored gets lost."""

import asyncio
import os
import random
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest

from protos.kvcache.v1 import kvcache_pb2 as pb
from protos.kvcommon.v1 import kvcommon_pb2 as common
from tests.support.cachemgr_client import NUM_BLOCKS, Client, environment, settings_for, wait_until_serving
from tests.support.managers import agreed, holds, leases, make_rule, pin, quotas, rules
from tests.support.patience import patience
from tests.support.redis_servers import Server

ROUNDS = int(os.environ.get("ROUNDS", "16"))
# The clock in Redis is written this often, and the manager's own advances in steps.
CLOCK_SECONDS = 2.5

State = dict[str, dict[str, object]]


class Life:
    """One executor, scheduler and operator; `history`: states that operators may find after a kill, the newest last."""

    def __init__(self, folder: Path, server: Server, seed: int) -> None:
        self.random = random.Random(seed)
        self.server = server
        self.folder = folder
        self.step = 0
        self.names = 0
        self.written = [0] * NUM_BLOCKS
        self.redis_runs = True
        # Whether Redis has everything.
        self.is_complete = False
        self.history: list[State] = []
        self.client = Client(settings_for(folder))

    async def start(self) -> None:
        """Starts the manager, and the executor and the scheduler find it."""
        variables = environment(self.folder, KVKEEP_REDIS_URL=self.server.url, KVKEEP_CACHEMGR_PIN_BUDGET="0.5")
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "cachemgr", env=variables, stderr=asyncio.subprocess.DEVNULL
        )
        await asyncio.to_thread(wait_until_serving, f"unix:{self.folder}/data", "")
        await self.client.close()
        self.client = Client(settings_for(self.folder))
        self.restored = (await self.client.register(last_write_steps=tuple(self.written))).restored_blocks

    async def kill(self) -> None:
        """Ends the manager without a warning."""
        self.process.kill()
        await self.process.wait()

    async def said(self) -> State:
        """What operators have said, as far as it need not change with time."""
        return {
            "rules": {rule.name: rule.SerializeToString() for rule in await rules(self.client)},
            "quotas": {quota.salt: quota.SerializeToString() for quota in await quotas(self.client)},
            "pins": {hold.name: (hold.owner, hold.num_blocks) for hold in await holds(self.client)},
        }

    async def note(self) -> None:
        self.history.append(await self.said())

    async def compute(self) -> None:
        """A prompt that shares a beginning with others, with retention that lasts."""
        self.names += 1
        self.step += 1
        length = self.random.choice((5, 9, 13))
        tokens = [self.random.randrange(3)] * 4 + [self.random.randrange(3)] * (length - 4)
        kept = common.RetentionRange(start=0, retention_priority=80, retention_duration=timedelta(seconds=1000))
        admitted = await self.client.admit(f"s{self.names}", tokens, retention=pb.RetentionConfig(ranges=[kept]))
        if admitted.admitted:
            own = admitted.block_tables[0].slots[admitted.cached_tokens // 4 :]
            for slot in own:
                self.written[slot - 1] = self.step
            await self.client.compute(admitted, length - 1, step=self.step)

    async def operate(self) -> None:
        """Says one thing, or takes one back."""
        admin, name = self.client.admin, self.random.choice("abc")
        match self.random.randrange(6):
            case 0 | 1:
                if name not in {rule.name for rule in await rules(self.client)}:
                    await make_rule(self.client, name, retention_priority=self.random.randrange(100))
                else:
                    await admin.DeleteRetentionRule(pb.DeleteRetentionRuleRequest(name=name))
            case 2:
                quota = pb.Quota(salt=name, device_ceiling_blocks=self.random.randrange(9))
                await admin.SetQuota(pb.SetQuotaRequest(quota=quota))
            case 3 if quotas_now := await quotas(self.client):
                await admin.DeleteQuota(pb.DeleteQuotaRequest(salt=quotas_now[0].salt))
            case 4:
                await pin(self.client, pb.PrefixSelector(token_ids=[self.random.randrange(3)] * 4), name, 1000)
            case 5 if pins := await holds(self.client):
                await admin.ReleaseHold(pb.ReleaseHoldRequest(name=self.random.choice(pins).name))
        await self.note()

    async def trouble_redis(self) -> None:
        """Kills it, or stops it for a moment or longer than any call waits; or the trouble is over."""
        if not self.redis_runs:
            # In this thread: it ends with the thread that starts it.
            self.server.start()
            self.redis_runs = True
        elif self.random.random() < 0.5:
            self.server.kill()
            self.redis_runs = False
        else:
            self.server.signal(signal.SIGSTOP)
            await asyncio.sleep(self.random.choice((0.1, 2.5)))
            self.server.signal(signal.SIGCONT)

    async def agree(self) -> None:
        """Redis has everything: from now on, operators find no state older than this."""
        if self.redis_runs:
            await agreed(self.client)
            self.history = [await self.said()]
            self.is_complete = True

    async def restart(self) -> None:
        """Kills the manager and compares the restored blocks."""
        before = self.history
        pins = {hold.name for hold in await holds(self.client)}
        remaining = {one.block.key: seconds(one) for one in await leases(self.client)}
        await self.kill()
        begin = time.monotonic()
        if not self.redis_runs:
            await self.trouble_redis()
        await self.start()
        now = await self.said()
        for kind, entries in now.items():
            possible = [state[kind] for state in before]
            if kind == "pins":
                # As many blocks as were restored are pinned.
                assert {*entries} in [{*one} for one in possible], (entries, possible)
            else:
                assert entries in possible, (kind, entries, possible)
        if self.is_complete:
            assert {*now["pins"]} == pins
            after = {one.block.key: seconds(one) for one in await leases(self.client)}
            assert after.keys() == remaining.keys()
            for key, left in after.items():
                passed = time.monotonic() - begin
                assert remaining[key] < left + passed + 1
                assert left < remaining[key] + CLOCK_SECONDS
        await self.client.check()
        self.history = [now]

    async def run(self) -> None:
        """So many things in any order; after each of them the manager is without contradiction."""
        await self.start()
        await self.note()
        for _ in range(ROUNDS):
            (what,) = self.random.choices(
                (self.compute, self.operate, self.agree, self.restart, self.trouble_redis),
                (8, 6, 2, 1.5, 1.5),
            )
            await what()
            await self.client.check()
            self.is_complete = what == self.agree and self.redis_runs
        if not self.redis_runs:
            await self.trouble_redis()
        await self.agree()
        await self.restart()
        await agreed(self.client)


def seconds(lease: pb.BlockLease) -> float:
    """What is left of it."""
    return lease.lease.remaining_duration.ToTimedelta().total_seconds()


@pytest.mark.parametrize("seed", [int(os.environ.get("SEED", "1"))])
async def test_whatever_dies_the_rest_continues_and_agrees_again(seed: int, tmp_path: Path, server: Server) -> None:
    life = Life(tmp_path, server, seed)
    try:
        async with asyncio.timeout(patience(60)):
            await life.run()
    finally:
        await life.client.close()
        await life.kill()
