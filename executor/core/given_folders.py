"""Folders that callers name: they lie below one that a setting names, and so does all that is read of them."""

from collections.abc import Iterable
from pathlib import Path

from protos.rpc.errors import InvalidField


def folder_below(root: Path, path: str, setting: str, files: Iterable[str]) -> Path:
    """A folder below a root, by its path or the part of it below the root. files: names or patterns of what is read.

    Links are followed before it is decided whether what they lead to lies below. Raises InvalidField.
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
