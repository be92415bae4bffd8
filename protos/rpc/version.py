"""The version of this program. Services report it with each answer about their health."""

import importlib.metadata

# The key of the version in the trailing metadata of grpc.health.v1.Health/Check.
VERSION_KEY = "kvkeep-version"


def program_version() -> str:
    """The version of the installed package."""
    try:
        return importlib.metadata.version("kvkeep")
    except importlib.metadata.PackageNotFoundError:
        # The program runs from a checkout that is not installed.
        return "unknown"
