"""The executor's process from settings to its end."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from pathlib import Path

import structlog
import uvloop

from executor.errors import CacheFileError, ModelError
from executor.settings import ExecutorSettings
from protos.rpc import addresses, logs, tracing
from protos.rpc.addresses import AddressError
from protos.rpc.settings import variable

log = structlog.get_logger()

# How long a process that stops tries to confirm its last copies.
CONFIRM_SECONDS = 0.5


def main(settings: ExecutorSettings) -> int:
    """Runs until SIGTERM or SIGINT; returns the exit status."""
    logs.configure("executor", settings.log_level)
    tracing.start("executor", os.environ)
    try:
        return uvloop.run(_serve(settings))
    except (ModelError, CacheFileError, AddressError) as error:
        print(f"executor: {error}", file=sys.stderr)  # noqa: T201
        return 1
    finally:
        tracing.stop()


def _check_addresses(settings: ExecutorSettings) -> None:
    """Raises AddressError before the model is loaded for addresses that no server could listen on."""
    for name, address in settings.listening.items():
        if address:
            addresses.prepare(address, insecure=settings.security.may_be_reached, setting=name)


async def _serve(settings: ExecutorSettings) -> int:
    started = time.monotonic()
    log.info("starting", model=settings.model or "default")
    _check_addresses(settings)
    # Imported late, so that a wrong setting is reported at once and not after seconds.
    import torch

    from executor.cache.pool import KvPools, block_bytes, count_blocks, free_memory
    from executor.cache.shares import share_memory
    from executor.cache.tiers.files import FileSettings, check_space
    from executor.cache.tiers.tiers import open_tiers
    from executor.core.outbox import Outbox
    from executor.core.runner import Runner
    from executor.core.watchdog import Watchdog
    from executor.core.worker import Worker
    from executor.metrics import WEIGHT_BYTES, KindSeconds
    from executor.models.cpu import CpuModel
    from executor.models.files import find
    from executor.models.fingerprint import fingerprint
    from executor.models.load import choose_device, load_model, release_unused_memory
    from executor.models.tokenizer import load_tokenizer
    from executor.rpc.announcement import PoolAnnouncement
    from executor.rpc.manager_client import ManagerClient, TransferLog
    from executor.rpc.service import SERVICE, ExecutorServicer, Identity
    from protos.execution.v1 import execution_pb2_grpc as rpc
    from protos.rpc.channel import open_channel
    from protos.rpc.server import Server

    torch.set_num_threads(settings.threads or len(os.sched_getaffinity(0)))
    device = choose_device(settings.device)

    def file_settings(tier: str, folder: Path) -> FileSettings:
        size, where = f"{tier}_cache_size", f"{tier}_cache_dir"
        return FileSettings(
            folder,
            getattr(settings, size),
            variable(ExecutorSettings, where),
            variable(ExecutorSettings, size),
            in_memory=tier == "host",
        )

    host, disk = file_settings("host", settings.host_cache_dir), file_settings("disk", settings.disk_dir)
    check_space(host)
    check_space(disk)
    files = find(settings.model, settings.cache_dir, lambda line: log.info(line))
    log.info("loading", model=files.name, device=str(device))
    model = load_model(files, device, settings.dtype, compiled_folder=settings.compiled_dir)
    if settings.batch_invariant:
        if not isinstance(model.forward, CpuModel):
            setting = variable(ExecutorSettings, "batch_invariant")
            raise ModelError(
                f"{setting}: {files.name} does not run in compiled code here, and only that is batch invariant"
            )
        model.forward.decoder.invariant = True
    tokenizer = load_tokenizer(files)
    release_unused_memory()
    blocks = count_blocks(
        model.groups,
        settings.block_size,
        model.dtype,
        max_tokens=settings.max_tokens,
        free_bytes=free_memory(device),
        fraction=settings.free_memory_fraction,
    )
    sizes = block_bytes(model.groups, settings.block_size, model.dtype)
    shares = share_memory(
        [group.shape.window for group in model.groups],
        sizes,
        blocks * sum(sizes),
        settings.block_size,
        expected_tokens=settings.expected_tokens,
        longest_tokens=model.max_positions,
        weights=settings.given_shares,
        movable=device.type == "cpu",
    )
    pools = KvPools(model.groups, shares, settings.block_size, model.dtype, device)
    log.info(
        "model loaded",
        dtype=str(model.dtype),
        layer_groups=len(model.groups),
        pool_tokens=pools.max_tokens,
        pool_blocks=list(shares.blocks),
        seconds=round(time.monotonic() - started, 1),
    )

    identity = Identity(settings.executor_id, time.time_ns())
    digest = fingerprint(model, files, settings.block_size)
    tiers = open_tiers(
        pools,
        digest,
        identity.executor_id,
        host=host,
        disk=disk,
        checksums=settings.cache_checksums,
    )
    announcement = PoolAnnouncement(
        identity.executor_id, identity.epoch, model.name, digest, pools, tiers, plain_rotary=model.rotary is not None
    )
    server = Server("executor", metrics_address=settings.metrics_address, security=settings.security)
    loop, lost = asyncio.get_running_loop(), asyncio.Event()

    def device_lost() -> None:
        loop.call_soon_threadsafe(lost.set)
        signal.raise_signal(signal.SIGTERM)

    if isinstance(model.forward, CpuModel):
        decoder = model.forward.decoder
        KindSeconds(lambda: decoder.seconds)
        WEIGHT_BYTES.set(decoder.weight_bytes)
        log.info("running in compiled code", weight_bytes=decoder.weight_bytes, bfloat16_products=decoder.products)
    transfers = TransferLog(loop)
    outbox = Outbox(transfers, tiers.block_times)
    runner = Runner(model, pools, tiers, outbox)
    runner.warmup()
    worker = Worker(runner, outbox, device_lost)
    watchdog = Watchdog(worker, server.set_serving, device_lost)
    client = ManagerClient(
        open_channel(settings.cachemgr_address, settings.security),
        announcement,
        worker,
        transfers,
        watchdog.set_registered,
    )
    servicer = ExecutorServicer(identity, runner, worker, tokenizer, client.is_registered)

    async def drain() -> None:
        servicer.stop()

    server.listen(
        settings.executor_address,
        {SERVICE: lambda grpc_server: rpc.add_ExecutorServiceServicer_to_server(servicer, grpc_server)},
        setting="KVKEEP_EXECUTOR_ADDRESS",
    )
    await server.start()
    worker.start()
    registration = asyncio.create_task(client.run())
    # It ends by itself only on a bug; then the process must end too.
    registration.add_done_callback(lambda task: None if task.cancelled() else signal.raise_signal(signal.SIGTERM))
    watching = asyncio.create_task(watchdog.run())
    await server.run_until_stopped(drain)
    ended = await asyncio.to_thread(worker.stop)
    await client.confirmed(CONFIRM_SECONDS)
    for task in (registration, watching):
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    if not ended:
        # The device's thread still uses the tiers, and no library may wait for it.
        os._exit(1)
    tiers.close()
    return 1 if lost.is_set() else 0
