"""Folders that callers name: they must lie below a configured folder, as must every file read from them."""

from collections.abc import Iterable
from pathlib import Path

from protos.rpc.errors import InvalidField


def folder_below(root: Path, path: str, setting: str, files: Iterable[str]) -> Path:
    """Returns the folder below `root` that `path` names. files: names or patterns of the files to be read from it.

    Follows links, and checks that their targets lie below the root. Raises InvalidField.
    """
    root = root.resolve()
    try:
        folder = (root / path).resolve()
        found = [file for name in files for file in (folder.glob(name) if "*" in name else [folder / name])]
        ends = [folder, *(file.resolve() for file in found)]
    except (OSError, ValueError, RuntimeError):
        ends = []
    if not ends or not all(root in end.parents for end in ends):
        raise InvalidField("path", f"must be a folder below {setting}")
    return folder
