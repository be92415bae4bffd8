"""Blocks are offloaded and onloaded as they were, or not at all."""

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import REGISTRY

from executor.cache.pool import KvPools
from executor.cache.tiers.device import CpuBlocks
from executor.cache.tiers.slot_file import DiskFile, HostFile, SlotFile
from executor.cache.tiers.tiers import Tiers
from executor.step import Copy, Tier
from tests.stack import ROOT
from tests.support.patience import patience
from tests.unit.executor.tiers.gates import waited_seconds
from tests.unit.executor.tiers.world import (
    Ends,
    block,
    down,
    fill,
    make_file,
    make_pools,
    make_tiers,
    shut,
    size_for,
    until_idle,
    up,
)

DEVICE, HOST, DISK = Tier.DEVICE, Tier.HOST, Tier.DISK
LOWER = pytest.mark.parametrize("tier", [HOST, DISK])


@pytest.fixture
def pools() -> KvPools:
    return make_pools()


@pytest.fixture
def tiers(pools: KvPools, tmp_path: Path) -> Iterator[Tiers]:
    tiers = make_tiers(pools, tmp_path)
    yield tiers
    shut(tiers)


def run(tiers: Tiers, *copies: Copy) -> dict[int, bool]:
    """Runs copies to their ends."""
    ends = Ends()
    tiers.begin(copies, ends)
    until_idle(tiers)
    return ends.of


def counted(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"kvkeep_executor_{name}", labels) or 0.0


def path_of(folder: Path, tier: Tier) -> Path:
    return next((folder / tier.name.lower()).iterdir())


def flip(folder: Path, tier: Tier, pools: KvPools, group: int, slot: int) -> None:
    """One bit of a block in a file."""
    from executor.cache.tiers.tiers import layout_of

    layout = layout_of(pools, b"f" * 32, size_for(pools, 4), checksums=True)
    with path_of(folder, tier).open("r+b") as file:
        file.seek(layout.offset(group, slot) + layout.block_bytes[group] // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))


@LOWER
@pytest.mark.parametrize("group", [0, 1])
def test_a_block_is_onloaded_as_it_was(tier: Tier, group: int, pools: KvPools, tiers: Tiers) -> None:
    before, others = block(pools, group, 2), [block(pools, group, slot) for slot in (1, 3, 4, 6)]
    copied = counted("copied_bytes_total", source="device", target=tier.name.lower())
    assert run(tiers, down(7, 2, 4, tier, group)) == {7: True}
    assert counted("copied_bytes_total", source="device", target=tier.name.lower()) - copied == len(before)
    fill(pools, group, 2, 5.0)
    assert tiers.block_times == {}
    assert run(tiers, up(8, 4, 5, tier, group)) == {8: True}
    assert block(pools, group, 5) == before
    assert [block(pools, group, slot) for slot in (1, 3, 4, 6)] == others
    assert 0 < tiers.block_times[tier] < 1
    assert tiers.snapshot().generations(tier, group).tolist() == [0, 0, 0, 7]


def test_a_block_passes_all_tiers_down_and_up(pools: KvPools, tiers: Tiers) -> None:
    before = block(pools, 0, 1)
    way = (down(1, 1, 1), Copy(2, 0, 1, 2, HOST, DISK), Copy(3, 0, 2, 3, DISK, HOST), up(4, 3, 6))
    assert run(tiers, *way) == {1: True, 2: True, 3: True, 4: True}
    assert block(pools, 0, 6) == before
    assert tiers.snapshot().generations(HOST, 0).tolist() == [1, 0, 3, 0]
    assert tiers.snapshot().generations(DISK, 0).tolist() == [0, 2, 0, 0]


@LOWER
def test_a_flipped_bit_is_detected_and_never_served(tier: Tier, pools: KvPools, tiers: Tiers, tmp_path: Path) -> None:
    assert run(tiers, down(1, 1, 1, tier), down(2, 2, 2, tier)) == {1: True, 2: True}
    flip(tmp_path, tier, pools, 0, 1)
    target, mismatches = block(pools, 0, 5), counted("checksum_mismatches_total", tier=tier.name.lower())
    failed = counted("failed_copies_total", source=tier.name.lower(), target="device")
    assert run(tiers, up(3, 1, 5, tier), up(4, 2, 6, tier)) == {3: False, 4: True}
    assert (block(pools, 0, 5), block(pools, 0, 6)) == (target, block(pools, 0, 2))
    assert counted("checksum_mismatches_total", tier=tier.name.lower()) == mismatches + 1
    assert counted("failed_copies_total", source=tier.name.lower(), target="device") == failed + 1


def test_a_flipped_bit_does_not_get_a_new_checksum_on_its_way(pools: KvPools, tiers: Tiers, tmp_path: Path) -> None:
    assert run(tiers, down(1, 1, 1)) == {1: True}
    flip(tmp_path, HOST, pools, 0, 1)
    assert run(tiers, Copy(2, 0, 1, 1, HOST, DISK), up(3, 1, 5, DISK)) == {2: True, 3: False}
    assert run(tiers, down(4, 1, 2, DISK)) == {4: True}
    flip(tmp_path, DISK, pools, 0, 2)
    assert run(tiers, Copy(5, 0, 2, 2, DISK, HOST)) == {5: False}


@LOWER
def test_without_checksums_no_byte_is_verified(tier: Tier, pools: KvPools, tmp_path: Path) -> None:
    tiers = make_tiers(pools, tmp_path, checksums=False)
    assert run(tiers, down(1, 1, 1, tier)) == {1: True}
    flip(tmp_path, tier, pools, 0, 1)
    assert run(tiers, up(2, 1, 5, tier)) == {2: True}
    different = np.frombuffer(block(pools, 0, 1), np.uint8) ^ np.frombuffer(block(pools, 0, 5), np.uint8)
    assert different[different > 0].tolist() == [4]
    shut(tiers)


@LOWER
def test_a_slot_that_holds_nothing_is_not_served(tier: Tier, pools: KvPools, tiers: Tiers) -> None:
    target = block(pools, 0, 5)
    assert run(tiers, up(1, 1, 5, tier)) == {1: False}
    assert block(pools, 0, 5) == target


@LOWER
@pytest.mark.parametrize("part", ["begin_read", "finish"])
def test_a_device_that_cannot_be_read_leaves_nothing_of_what_the_slot_held(
    tier: Tier, tiers: Tiers, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("the device is lost")

    assert run(tiers, down(1, 1, 2, tier)) == {1: True}
    monkeypatch.setattr(CpuBlocks, part, fail)
    assert run(tiers, down(2, 1, 2, tier)) == {2: False}
    assert tiers.snapshot().generations(tier, 0).tolist() == [0, 0, 0, 0]


@LOWER
def test_zeros_replace_the_bytes_of_a_slot(tier: Tier, pools: KvPools, tiers: Tiers, tmp_path: Path) -> None:
    assert run(tiers, down(1, 1, 2, tier), down(2, 2, 3, tier)) == {1: True, 2: True}
    secret = block(pools, 0, 1)
    assert secret in path_of(tmp_path, tier).read_bytes()
    assert run(tiers, Copy(3, 0, 0, 2, tier, tier)) == {3: True}
    assert secret not in path_of(tmp_path, tier).read_bytes()
    assert block(pools, 0, 2) in path_of(tmp_path, tier).read_bytes()
    assert tiers.snapshot().generations(tier, 0).tolist() == [0, 0, 2, 0]


def test_a_disk_that_takes_no_bytes_fails_copies_down_and_nothing_else(
    pools: KvPools, tiers: Tiers, tmp_path: Path
) -> None:
    assert run(tiers, down(1, 1, 1, DISK), down(2, 2, 1)) == {1: True, 2: True}
    file = tiers._files[DISK]
    assert isinstance(file, DiskFile)
    kept = os.dup(file._fd)
    read_only = os.open(path_of(tmp_path, DISK), os.O_RDONLY)
    os.dup2(read_only, file._fd)
    failed = counted("failed_copies_total", source="device", target="disk")
    copies = [down(ticket, 3, ticket - 8, DISK) for ticket in (10, 11, 12)]
    assert run(tiers, *copies, down(13, 3, 3), up(14, 1, 5, DISK), up(15, 1, 6)) == (
        dict.fromkeys((10, 11, 12), False) | dict.fromkeys((13, 14, 15), True)
    )
    assert counted("failed_copies_total", source="device", target="disk") == failed + 3
    assert tiers.snapshot().generations(DISK, 0).tolist() == [1, 0, 0, 0]
    os.dup2(kept, file._fd)
    assert run(tiers, down(20, 3, 2, DISK)) == {20: True}
    for fd in (kept, read_only):
        os.close(fd)


def test_a_slow_disk_keeps_no_device_slot_once_it_was_read(pools: KvPools, tmp_path: Path) -> None:
    storing, go_on = threading.Event(), threading.Event()

    class SlowDisk(DiskFile):
        def store(self, group: int, slot: int, data: Any) -> None:
            storing.set()
            go_on.wait(patience(10))
            super().store(group, slot, data)

    tiers, ends, before = Tiers(pools, [make_file(SlowDisk, pools, tmp_path)]), Ends(), block(pools, 0, 1)
    tiers.begin([down(1, 1, 1, DISK)], ends)
    assert storing.wait(patience(10))
    tiers.wait(writes=[(DEVICE, 0, 1)])
    assert ends.of == {}
    fill(pools, 0, 1, 3.0)
    go_on.set()
    assert run(tiers, up(2, 1, 4, DISK)) == {2: True}
    assert block(pools, 0, 4) == before
    shut(tiers)


def test_a_new_process_finds_what_the_one_before_left(pools: KvPools, tmp_path: Path) -> None:
    tiers = make_tiers(pools, tmp_path)
    before = [block(pools, 0, 1), block(pools, 1, 2)]
    assert all(run(tiers, down(5, 1, 3), down(6, 2, 1, DISK, group=1)).values())
    shut(tiers)
    pools = make_pools()
    tiers = make_tiers(pools, tmp_path)
    assert tiers.snapshot().generations(HOST, 0).tolist() == [0, 0, 5, 0]
    assert tiers.snapshot().generations(DISK, 1).tolist() == [6, 0, 0, 0]
    assert all(run(tiers, up(7, 3, 4), up(8, 1, 4, DISK, group=1)).values())
    assert [block(pools, 0, 4), block(pools, 1, 4)] == before
    shut(tiers)


def test_blocks_that_are_being_copied_do_not_count(pools: KvPools, tmp_path: Path) -> None:
    go_on = threading.Event()

    class SlowHost(HostFile):
        def claim(self, group: int, slot: int) -> None:
            go_on.wait(patience(10))
            super().claim(group, slot)

    tiers = Tiers(pools, [make_file(SlowHost, pools, tmp_path)])
    go_on.set()
    assert run(tiers, down(1, 1, 1)) == {1: True}
    go_on.clear()
    tiers.begin([down(2, 2, 1), down(3, 2, 2), up(4, 1, 3)], Ends())
    # None of them has begun: the first slot still holds what the first copy brought.
    assert tiers.snapshot().generations(HOST, 0).tolist() == [1, 0, 0, 0]
    assert set(tiers.snapshot().changing) == {(HOST, 0, 1), (HOST, 0, 2), (DEVICE, 0, 3)}
    go_on.set()
    shut(tiers)


def test_tiers_that_do_not_exist_cost_nothing(pools: KvPools) -> None:
    def threads() -> list[str]:
        """The threads that copy: other threads come and go."""
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("copies, ")]

    before = threads()
    tiers = Tiers(pools)
    assert (tiers.slots, tiers.busy) == ({}, False)
    waited = waited_seconds()
    tiers.wait(writes=[(DEVICE, 0, 1)])
    assert waited_seconds() == waited
    assert tiers.snapshot().generations(HOST, 0).tolist() == []
    shut(tiers)
    assert threads() == before


KILLED = """
import sys, time
from pathlib import Path
from executor.cache.tiers.device import CpuBlocks
from executor.cache.tiers import tiers as module
from executor.cache.tiers.device import CpuBlocks
from executor.cache.tiers.slot_file import DiskFile
from tests.unit.executor.tiers.world import Ends, down, make_pools, make_tiers, until_idle
from executor.step import Tier

stuck = False

class Device(CpuBlocks):
    def begin_read(self, group, slot, into, after):
        super().begin_read(group, slot, into, after)
        if tier is Tier.HOST:
            break_off(into)

class Disk(DiskFile):
    def store(self, group, slot, data):
        super().store(group, slot, data)
        break_off(data)

def break_off(data):
    if stuck:
        # As far as the middle of the block.
        data[len(data) // 2 :] = 0
        print("half", flush=True)
        time.sleep(60)

module.blocks_of = Device
module.DiskFile = Disk
tier = Tier[sys.argv[2]]
tiers = make_tiers(make_pools(), Path(sys.argv[1]))
tiers.begin([down(1, 1, 1, tier), down(2, 2, 2, tier)], Ends())
until_idle(tiers)
stuck = True
tiers.begin([down(3, 3, 1, tier)], Ends())
time.sleep(60)
"""


@LOWER
def test_a_copy_that_a_kill_breaks_off_leaves_no_block(tier: Tier, pools: KvPools, tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path), tier.name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        assert any(line == "half\n" for line in process.stdout)
        process.send_signal(signal.SIGKILL)
        process.wait(patience(10))
    tiers = make_tiers(pools, tmp_path)
    assert tiers.snapshot().generations(tier, 0).tolist() == [0, 2, 0, 0]
    assert run(tiers, up(4, 1, 1, tier), up(5, 2, 2, tier)) == {4: False, 5: True}
    shut(tiers)


@pytest.mark.parametrize(("kind", "left"), [(HostFile, [Tier.DISK]), (DiskFile, [Tier.HOST])])
def test_storage_that_fails_while_it_is_read_costs_its_tier_only(
    pools: KvPools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[SlotFile], left: list[Tier]
) -> None:
    def fail(_: SlotFile) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(kind, "_load_table", fail)
    opened = make_tiers(pools, tmp_path)
    assert list(opened.slots) == left
    opened.close()
    # The file was closed, and may be opened again.
    monkeypatch.undo()
    opened = make_tiers(pools, tmp_path)
    assert list(opened.slots) == [Tier.HOST, Tier.DISK]
    opened.close()
