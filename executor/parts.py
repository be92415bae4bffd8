"""Loads the model, puts the parts of an executor together, and serves until it is stopped."""

import asyncio
import hashlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import structlog
import torch

from executor import preflight
from executor.cache.pool import KvPools, block_bytes, count_blocks, free_memory
from executor.cache.shares import share_memory
from executor.cache.tiers.files import FileSettings
from executor.cache.tiers.tiers import Tiers, open_tiers
from executor.core.adapters import Adapters
from executor.core.draft_model import Draft, DraftModel
from executor.core.drafts import Drafter
from executor.core.grammars import Grammars
from executor.core.outbox import Outbox
from executor.core.rehearsal import rehearse
from executor.core.runner import Runner
from executor.core.watchdog import Watchdog
from executor.core.worker import Worker
from executor.errors import ModelError, first_line
from executor.metrics import WEIGHT_BYTES, KindSeconds
from executor.models.cpu import CpuModel
from executor.models.device_errors import is_out_of_memory
from executor.models.files import ModelFiles, find
from executor.models.fingerprint import fingerprint
from executor.models.forward import Model
from executor.models.load import choose_cache_dtype, choose_device, load_model, release_unused_memory
from executor.models.scales import choose_scales
from executor.models.tokenizer import TokenizerFiles, load_tokenizer
from executor.rpc.announcement import PoolAnnouncement
from executor.rpc.manager_client import ManagerClient, TransferLog
from executor.rpc.service import SERVICE, ExecutorServicer, Identity
from executor.rpc.sessions import SchedulerLeases, Sessions
from executor.rpc.weights import WeightUpdates
from executor.settings import ExecutorSettings
from protos.execution.v1 import execution_pb2_grpc as rpc
from protos.rpc.channel import open_channel
from protos.rpc.server import Server, StopSignals
from protos.rpc.settings import variable

log = structlog.get_logger()

# How long a stopping process tries to confirm its last copies.
CONFIRM_SECONDS = 0.5


@dataclass(frozen=True)
class Loaded:
    """What an executor computes with.

    drafter: None without drafts. digest: fingerprint of the model, and of the draft model if there is one.
    """

    files: ModelFiles
    model: Model
    tokenizer: TokenizerFiles
    pools: KvPools
    drafter: Drafter | None
    digest: bytes


@dataclass(frozen=True)
class Parts:
    """The parts of an executor that `serve` starts and stops."""

    worker: Worker
    tiers: Tiers
    client: ManagerClient
    watchdog: Watchdog
    servicer: ExecutorServicer


def load(settings: ExecutorSettings, started: float) -> Loaded:
    """Loads the model and makes its pools. started: when the process began, by time.monotonic(). Raises ModelError."""
    torch.set_num_threads(settings.threads or len(os.sched_getaffinity(0)))
    device = choose_device(settings.device)
    files, model, tokenizer = _load(settings.model, settings, device)
    if settings.batch_invariant:
        _make_invariant(model)
    cache_dtype = choose_cache_dtype(settings.kv_cache_dtype, model)
    scales = choose_scales(settings.kv_scales, model, files, tokenizer, cache_dtype, settings.scales_dir)
    sizes = block_bytes(model.groups, settings.block_size, cache_dtype)
    drafting = device.type == "cpu" and settings.max_drafts > 0
    if settings.max_drafts and not drafting:
        log.warning("running without drafts", cause="steps are launched before the previous step's tokens are known")
    draft = None
    if settings.draft_model and drafting:
        draft = _load_draft(settings, device, model, tokenizer)
        sizes = draft.with_bytes(sizes, settings.block_size)
    release_unused_memory()
    if device.type == "cuda":
        rehearse(model, settings.block_size, cache_dtype, scales, settings.max_batched_tokens)
    blocks = count_blocks(
        sizes,
        settings.block_size,
        max_tokens=settings.max_tokens,
        free_bytes=free_memory(device),
        fraction=settings.free_memory_fraction,
    )
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
    ahead = None if draft is None else DraftModel.of(draft, shares, settings.block_size)
    pools = KvPools(
        model.groups, shares, settings.block_size, cache_dtype, device, scales, ahead.beside if ahead else {}
    )
    log.info(
        "model loaded",
        dtype=str(model.dtype),
        kv_cache_dtype=str(cache_dtype),
        layer_groups=len(model.groups),
        pool_tokens=pools.max_tokens,
        pool_blocks=list(shares.blocks),
        seconds=round(time.monotonic() - started, 1),
    )
    digest = fingerprint(model, files, pools)
    if draft is not None and ahead is not None:
        digest = hashlib.sha256(digest + fingerprint(draft.model, draft.files, ahead.pools)).digest()
    drafter = Drafter(settings.max_drafts, model=ahead) if drafting else None
    return Loaded(files, model, tokenizer, pools, drafter, digest)


def _load(source: str, settings: ExecutorSettings, device: torch.device) -> tuple[ModelFiles, Model, TokenizerFiles]:
    """Loads a model and its tokenizer. Raises ModelError."""
    files = find(source, settings.cache_dir, lambda line: log.info(line))
    log.info("loading", model=files.name, device=str(device))
    model = load_model(files, device, settings.dtype, compiled_folder=settings.compiled_dir)
    return files, model, load_tokenizer(files, settings.chat_template)


def _load_draft(settings: ExecutorSettings, device: torch.device, model: Model, tokenizer: TokenizerFiles) -> Draft:
    """Returns the draft model for a model. Raises ModelError naming the setting."""
    try:
        return Draft.of(*_load(settings.draft_model, settings, device), model, tokenizer)
    except ModelError as error:
        raise ModelError(f"{variable(ExecutorSettings, 'draft_model')}: {error}") from error


def _make_invariant(model: Model) -> None:
    """Makes the model batch invariant. Raises ModelError if this is not possible."""
    if not isinstance(model.forward, CpuModel):
        setting = variable(ExecutorSettings, "batch_invariant")
        raise ModelError(
            f"{setting}: {model.name} does not run in compiled code here, and only compiled code is batch invariant"
        )
    model.forward.decoder.invariant = True


def _load_weights(files: ModelFiles, settings: ExecutorSettings, device: torch.device, folder: Path | None) -> Model:
    """Returns the model with the weights of a folder; None for the weights of the start. Raises ModelError."""
    found = files if folder is None else ModelFiles(files.name, str(folder))
    model = load_model(found, device, settings.dtype, compiled_folder=settings.compiled_dir)
    if settings.batch_invariant:
        _make_invariant(model)
    return model


def _kind_seconds(runner: Runner) -> dict[str, float]:
    """Returns the times of the decoder that computes now: other weights have a separate decoder."""
    assert isinstance(runner.model.forward, CpuModel)
    return runner.model.forward.decoder.seconds


def build(
    settings: ExecutorSettings,
    loaded: Loaded,
    tier_files: tuple[FileSettings, FileSettings],
    *,
    set_serving: Callable[[bool], None],
    device_lost: Callable[[], None],
) -> Parts:
    """Puts the parts together, and warms the model up. Must be called in the event loop that runs the parts.

    Raises ModelError for adapters that do not fit, and CacheFileError for files of tiers that cannot be opened.
    """
    model, pools, files = loaded.model, loaded.pools, loaded.files
    identity = Identity(settings.executor_id, time.time_ns())
    host, disk = tier_files
    tiers = open_tiers(
        pools, loaded.digest, identity.executor_id, host=host, disk=disk, checksums=settings.cache_checksums
    )
    announcement = PoolAnnouncement(
        identity.executor_id,
        identity.epoch,
        model.name,
        loaded.digest,
        pools,
        tiers,
        plain_rotary=model.rotary is not None,
    )
    transfers = TransferLog(asyncio.get_running_loop())
    outbox = Outbox(transfers, tiers.block_times)
    grammars = Grammars(loaded.tokenizer.json, model.vocab_size, model.eos_token_ids)
    runner = Runner(model, pools, tiers, outbox.copy_ended, loaded.drafter, grammars)
    if isinstance(model.forward, CpuModel):
        decoder = model.forward.decoder
        KindSeconds(partial(_kind_seconds, runner))
        WEIGHT_BYTES.set(decoder.weight_bytes)
        log.info(
            "running in compiled code",
            weight_bytes=decoder.weight_bytes,
            plain_matrices=sorted(decoder.plain),
            bfloat16_products=decoder.products,
        )
    adapters = Adapters(
        runner,
        folder=settings.adapter_dir,
        most=settings.max_adapters,
        largest_rank=settings.max_adapter_rank,
    )
    adapters.load_given(settings.given_adapters, variable(ExecutorSettings, "adapters"))
    warm_up(runner)
    worker = Worker(runner, outbox, device_lost)
    watchdog = Watchdog(worker, set_serving, device_lost)
    leases = SchedulerLeases()
    sessions = Sessions(identity.epoch, leases, worker)
    client = ManagerClient(
        open_channel(settings.cachemgr_address, settings.security),
        announcement,
        worker,
        transfers,
        watchdog.set_registered,
        leases,
        sessions,
    )
    load_weights = partial(_load_weights, files, settings, model.device)
    weights = WeightUpdates(worker, sessions, client, adapters, load_weights, settings.weights_dir)
    servicer = ExecutorServicer(
        identity,
        runner,
        worker,
        loaded.tokenizer,
        leases,
        adapters,
        sessions,
        weights,
        hub_id=files.hub_id,
        max_batched_tokens=settings.max_batched_tokens,
    )
    return Parts(worker, tiers, client, watchdog, servicer)


def warm_up(runner: Runner) -> None:
    """Warms a runner up. Raises ModelError if the pools leave too little memory."""
    try:
        runner.warmup()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        setting = variable(ExecutorSettings, "free_memory_fraction")
        said = f"the pools leave no memory for steps on {runner.model.device}: {first_line(error)}; lower {setting}"
        raise ModelError(said) from error


async def serve(settings: ExecutorSettings, started: float) -> int:
    """Serves until SIGTERM or SIGINT, or until the device is lost; returns the exit status. started: as in `load`.

    Raises ModelError, CacheFileError, AddressError.
    """
    tier_files = preflight.tier_files(settings)
    # Set if the process ends because of a fault.
    loop, broken = asyncio.get_running_loop(), asyncio.Event()

    def device_lost() -> None:
        loop.call_soon_threadsafe(broken.set)
        signal.raise_signal(signal.SIGTERM)

    # Deleted below: only the runner may refer to the model, so that weights are freed once other weights replace them.
    loaded = load(settings, started)
    server = Server("executor", metrics_address=settings.metrics_address, security=settings.security)
    parts = build(settings, loaded, tier_files, set_serving=server.set_serving, device_lost=device_lost)
    del loaded

    async def drain() -> None:
        parts.servicer.stop()

    server.listen(
        settings.executor_address,
        {SERVICE: lambda grpc_server: rpc.add_ExecutorServiceServicer_to_server(parts.servicer, grpc_server)},
        setting="KVKEEP_EXECUTOR_ADDRESS",
    )
    signals = StopSignals()
    await server.start()
    parts.worker.start()
    tasks = [asyncio.create_task(parts.client.run()), asyncio.create_task(parts.watchdog.run())]
    for task in tasks:
        task.add_done_callback(partial(end_with, broken))
    await server.run_until_stopped(signals, drain)
    ended = await asyncio.to_thread(parts.worker.stop)
    await parts.client.confirmed(CONFIRM_SECONDS)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    if not ended:
        # The device's thread still uses the tiers, and no library may wait for it.
        os._exit(1)
    parts.tiers.close()
    return 1 if broken.is_set() else 0


def end_with(broken: asyncio.Event, task: asyncio.Task[None]) -> None:
    """Ends the process, whose task has ended, unless the task was cancelled or the process ends already.

    broken: set if the process ends because of a fault. The watchdog ends once it has given up and the event is set.
    """
    if task.cancelled() or broken.is_set():
        return
    log.error("the executor failed", exc_info=task.exception())
    broken.set()
    signal.raise_signal(signal.SIGTERM)
