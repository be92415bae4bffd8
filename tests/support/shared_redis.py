"""A Redis that the tests of one process share."""

import atexit
import functools
import shutil
import tempfile
from pathlib import Path

from redis import Redis

from tests.support.local_redis import LocalRedis


def empty_redis() -> str:
    """URL of the shared server, emptied. With an absent one each registration of an executor waits three seconds."""
    url = _server()
    with Redis.from_url(url) as client:
        client.flushall()
    return url


@functools.cache
def _server() -> str:
    folder = Path(tempfile.mkdtemp(prefix="kvk-", dir="/tmp"))
    server = LocalRedis(folder)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    atexit.register(server.stop)
    return server.url
