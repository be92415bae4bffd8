"""What both entry points share: the environment as settings."""

from collections.abc import Mapping
from pathlib import Path

from executor.settings import ExecutorSettings
from protos.rpc.settings import load


def settings_from(environ: Mapping[str, str]) -> ExecutorSettings:
    """Settings of an environment; XDG_CACHE_HOME moves the cache folder unless its own variable does."""
    values = dict(environ)
    if environ.get("XDG_CACHE_HOME"):
        values.setdefault("KVKEEP_EXECUTOR_CACHE_DIR", str(Path(environ["XDG_CACHE_HOME"], "kvkeep")))
    return load(ExecutorSettings, values)
