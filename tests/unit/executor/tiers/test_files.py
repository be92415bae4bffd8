"""Files of lower tiers: their contents, their permissions, and their errors without space."""

import os
import stat
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from executor.cache.tiers import files
from executor.cache.tiers.files import file_name, open_file
from executor.cache.tiers.layout import PAGE, slots_within
from executor.cache.tiers.slot_file import DiskFile, HostFile, SlotFile
from executor.cache.tiers.tiers import layout_of, open_tiers
from executor.errors import CacheFileError
from executor.step import Tier
from tests.unit.executor.tiers.world import FINGERPRINT, held, make_file, make_pools, put, settings, size_for

POOLS = make_pools()
KINDS = pytest.mark.parametrize("kind", [HostFile, DiskFile])


@KINDS
def test_a_file_keeps_blocks_and_their_tickets_until_it_is_opened_again(kind: type[SlotFile], tmp_path: Path) -> None:
    file = make_file(kind, POOLS, tmp_path)
    first, second = put(file, 0, 4, 100, seed=1), put(file, 1, 1, 1 << 63, seed=2)
    file.claim(1, 2)
    file.close()
    again = make_file(kind, POOLS, tmp_path)
    assert again.generations().tolist() == [[0, 0, 0, 100], [1 << 63, 0, 0, 0]]
    assert (held(again, 0, 4), held(again, 1, 1)) == (first, second)
    assert (again.checksum(0, 4), again.checksum(0, 1)) == (77, 0)
    again.close()


@KINDS
def test_blocks_lie_on_pages_and_beside_each_other(kind: type[SlotFile], tmp_path: Path) -> None:
    file = make_file(kind, POOLS, tmp_path)
    places = [(group, slot) for group in (0, 1) for slot in range(1, 5)]
    written = {place: put(file, *place, 1, seed=10 * place[0] + place[1]) for place in places}
    assert {place: held(file, *place) for place in written} == written
    assert all(file.layout.offset(*place) % PAGE == 0 for place in written)
    file.close()


@pytest.mark.parametrize("change", ["model", "slots", "block size", "checksums", "header", "length"])
@KINDS
def test_a_file_of_another_layout_is_made_anew(kind: type[SlotFile], change: str, tmp_path: Path) -> None:
    file = make_file(kind, POOLS, tmp_path)
    put(file, 0, 1, 100)
    file.close()
    tier = "HOST" if kind is HostFile else "DISK"
    asked = settings(tmp_path, tier, size_for(POOLS, 5 if change == "slots" else 4))
    fingerprint = b"g" * 32 if change == "model" else FINGERPRINT
    layout = layout_of(POOLS, fingerprint, asked.size, checksums=change != "checksums")
    if change == "block size":
        layout = replace(layout, identity=b"i" * 32)
    if change in ("header", "length"):
        # As a process leaves it that was killed while it made the file.
        with (tmp_path / f"{tier}.kv").open("r+b") as raw:
            raw.write(bytes(64)) if change == "header" else raw.truncate(PAGE)
    again = kind(open_file(asked, f"{tier}.kv", layout), layout)  # type: ignore[call-arg]
    assert not again.generations().any()
    assert not any(held(again, 0, 1))
    again.close()


def test_without_checksums_a_file_is_good_until_the_machine_starts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    boot = tmp_path / "boot_id"
    monkeypatch.setattr("executor.cache.tiers.tiers._BOOT_ID", boot)
    found = []
    for life in ("one", "one", "two"):
        boot.write_text(life)
        file = make_file(DiskFile, POOLS, tmp_path / "cache", checksums=False)
        found.append(file.generation(0, 1))
        put(file, 0, 1, 100)
        file.close()
    assert found == [0, 100, 0]


def test_the_size_is_a_bound_and_all_groups_get_as_many_slots(tmp_path: Path) -> None:
    block_bytes = tuple(pool.block_bytes for pool in POOLS.pools)
    for size in (0, PAGE, 100_000, 1_000_000, 12_345_678):
        layout = layout_of(POOLS, FINGERPRINT, size, checksums=True)
        assert layout.slots == slots_within(size, block_bytes)
        assert layout.size <= size or not layout.slots
    file = make_file(DiskFile, POOLS, tmp_path, slots=7)
    assert file.generations().shape == (2, 7)
    assert (tmp_path / "DISK.kv").stat().st_size == file.layout.size
    # All of it is allocated: it cannot run out of space later.
    assert (tmp_path / "DISK.kv").stat().st_blocks * 512 >= file.layout.size
    file.close()


@KINDS
def test_two_executors_never_share_a_file(
    kind: type[SlotFile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "LOCK_SECONDS", 0.1)
    file = make_file(kind, POOLS, tmp_path)
    put(file, 0, 1, 100)
    with pytest.raises(CacheFileError, match=r"another executor uses .*KVKEEP_EXECUTOR_EXECUTOR_ID.*_CACHE_DIR"):
        make_file(kind, POOLS, tmp_path)
    assert file.generation(0, 1) == 100
    file.close()
    make_file(kind, POOLS, tmp_path).close()


def test_every_executor_has_a_file_of_its_own() -> None:
    names = [file_name("host", name) for name in ("executor-0", "executor-1", "a/b", "a-b", "ü" * 200, "../../etc")]
    assert len(set(names)) == len(names)
    assert all("/" not in name and len(name) < 128 for name in names)
    assert names[0].startswith("host-executor-0-")


@KINDS
def test_no_other_user_can_read_a_file(kind: type[SlotFile], tmp_path: Path) -> None:
    folder = tmp_path / "of" / "ours"
    file = make_file(kind, POOLS, folder)
    path = next(folder.iterdir())
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    file.close()
    path.chmod(0o644)
    make_file(kind, POOLS, folder).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def _open_folder(path: Path) -> None:
    path.mkdir()
    path.chmod(0o777)


def _link_folder(path: Path) -> None:
    (path.parent / "elsewhere").mkdir()
    path.symlink_to(path.parent / "elsewhere")


def _link_file(path: Path) -> None:
    path.mkdir(0o700)
    (path.parent / "precious").write_text("precious")
    (path / "HOST.kv").symlink_to(path.parent / "precious")


def _hard_link(path: Path) -> None:
    path.mkdir(0o700)
    (path.parent / "precious").write_text("precious")
    os.link(path.parent / "precious", path / "HOST.kv")


def _no_file(path: Path) -> None:
    path.mkdir(0o700)
    os.mkfifo(path / "HOST.kv")


def _no_folder(path: Path) -> None:
    path.write_text("a file")


@pytest.mark.parametrize("prepare", [_open_folder, _link_folder, _link_file, _hard_link, _no_file, _no_folder])
def test_what_others_have_put_there_is_refused(prepare: object, tmp_path: Path) -> None:
    assert callable(prepare)
    prepare(tmp_path / "cache")
    with pytest.raises(CacheFileError, match="KVKEEP_EXECUTOR_HOST_CACHE_DIR"):
        make_file(HostFile, POOLS, tmp_path / "cache")
    if (tmp_path / "precious").exists():
        assert (tmp_path / "precious").read_text() == "precious"


def test_a_tier_on_storage_that_has_become_read_only_is_left_out(tmp_path: Path) -> None:
    make_file(DiskFile, POOLS, tmp_path / "disk").close()
    folder = str(tmp_path / "disk")
    for command in (["mount", "--bind", folder, folder], ["mount", "-o", "remount,bind,ro", folder]):
        if subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("this user may not mount")
    try:
        options = {"host": settings(tmp_path / "host", "HOST", size_for(POOLS, 4)), "checksums": True}
        disk = settings(tmp_path / "disk", "DISK", size_for(POOLS, 4))
        tiers = open_tiers(POOLS, FINGERPRINT, "executor-0", disk=disk, **options)
        assert list(tiers.slots) == [Tier.HOST]
        tiers.close()
    finally:
        subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize("tier", ["HOST", "DISK"])
def test_too_little_space_is_reported_at_the_start(tier: str, tmp_path: Path) -> None:
    for size, told in ((PAGE, "a single block takes"), (1 << 55, "no (memory|space) for")):
        asked = settings(tmp_path, tier, size)
        # The number of slots is not under test here.
        layout = replace(layout_of(POOLS, FINGERPRINT, 10 * PAGE, checksums=True), slots=size >> 14)
        layout = layout if size > PAGE else layout_of(POOLS, FINGERPRINT, size, checksums=True)
        with pytest.raises(CacheFileError, match=f"KVKEEP_EXECUTOR_{tier}_CACHE_SIZE.*{told}"):
            open_file(asked, "cache.kv", layout)
    # No file that takes space is left.
    assert sum(path.stat().st_blocks for path in tmp_path.iterdir()) == 0
