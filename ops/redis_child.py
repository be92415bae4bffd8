"""The embedded Redis in the form that the supervisor knows."""

from pathlib import Path

from cachemgr.persistence.embedded_redis import EmbeddedRedis

TAIL_LINES = 20


class RedisChild:
    """The server of a state folder. It ends with this process, whatever happens."""

    def __init__(self, state_dir: Path) -> None:
        self.log = state_dir / "redis/server.log"
        self._state_dir = state_dir
        self._server: EmbeddedRedis | None = None

    @property
    def url(self) -> str:
        """What KVKEEP_REDIS_URL must be; after the first start."""
        assert self._server is not None
        return self._server.url

    def start(self) -> None:
        """Starts the server, or starts it again. Raises EmbeddedRedisError."""
        if self._server is None:
            self._server = EmbeddedRedis.start(self._state_dir)
        else:
            self._server.revive()

    def ended(self) -> str:
        """How the process ended, in words; empty while it runs."""
        return "ended" if self._server and self._server.has_ended() else ""

    def terminate(self) -> None:
        """Nothing: a server ends within `wait` and has no calls to wait for."""

    def kill(self) -> None:
        """Nothing, for the same reason."""

    def wait(self) -> bool:
        """Ends the server with its data on disk."""
        if self._server is not None:
            self._server.stop()
        return True

    def tail(self) -> list[str]:
        """Last lines of the log."""
        return self.log.read_text(errors="replace").splitlines()[-TAIL_LINES:] if self.log.exists() else []
