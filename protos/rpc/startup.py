"""The start of each process: command line, open files, and garbage collection.

Imports nothing that takes time.
"""

import argparse
import gc
import resource

SETTINGS = """settings:
  Environment variables, read once at the start: KVKEEP_<NAME> for all processes, KVKEEP_<PROCESS>_<NAME> for one.
  docs/settings.md lists them all with their defaults. An unknown KVKEEP_ variable is an error."""
# The limit that the systemd units set; the soft limit of 1,024, common in shells, allows few connections.
MOST_FILES = 65_536


def process_parser(program: str, description: str) -> argparse.ArgumentParser:
    """Makes a parser for a program whose settings are environment variables; it refuses any argument not added."""
    return argparse.ArgumentParser(
        prog=program,
        description=description,
        epilog=SETTINGS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def raise_file_limit() -> int:
    """Raises the soft limit of open files as far as the hard limit and `MOST_FILES` allow; returns the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return MOST_FILES if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def collect_rarely() -> None:
    """Makes full garbage collections a hundred times rarer, and exempts the objects of the start from them.

    A full collection stops the process for a third of a second per million objects and frees almost nothing: long-lived
    objects form no cycles, and other collections free young objects. Call it when the start is over.
    """
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, 1_000)
