"""What every process says of itself on --help. Imports nothing that takes time."""

import argparse

SETTINGS = """settings:
  Environment variables, read once at the start: KVKEEP_<NAME> for all processes, KVKEEP_<PROCESS>_<NAME> for one.
  docs/settings.md lists them all with their defaults. An unknown KVKEEP_ variable is an error."""


def process_parser(program: str, description: str) -> argparse.ArgumentParser:
    """A parser of a program whose settings are environment variables; it refuses every argument not added to it."""
    return argparse.ArgumentParser(
        prog=program,
        description=description,
        epilog=SETTINGS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
