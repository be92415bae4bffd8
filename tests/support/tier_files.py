"""Access of tests to files of lower tiers. Blocks are those of the default model in float32."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.support.leftovers import PREFIX

BLOCK_BYTES = 1 << 20


@contextmanager
def folder_in_memory() -> Iterator[Path]:
    """A folder for tiers: blocks that a busy disk delivers later than they are computed would not be onloaded."""
    with TemporaryDirectory(prefix=PREFIX, dir="/dev/shm") as name:
        yield Path(name)


def only_file(folder: Path) -> Path:
    """The tier's file in its folder."""
    (file,) = (path for path in folder.iterdir() if path.stat().st_size > BLOCK_BYTES)
    return file


def flip_bytes(file: Path) -> None:
    """Changes bytes of every block."""
    with file.open("r+b") as blocks:
        for place in range(BLOCK_BYTES // 2, file.stat().st_size, BLOCK_BYTES // 4):
            blocks.seek(place)
            (byte,) = blocks.read(1)
            blocks.seek(place)
            blocks.write(bytes([byte ^ 1]))
