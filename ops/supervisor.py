"""Starts services, waits until they are healthy, restarts services that end, and stops all in reverse order."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import grpc
from children import Child
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.rpc.channel import open_sync_channel
from protos.rpc.security import PLAIN, Security

PROBE_SECONDS = 1.0
_PROBES_AT_A_TIME = 16
RESTARTS = 3
RESTART_WINDOW_SECONDS = 60.0
BACKOFF_SECONDS = (0.2, 1.0, 3.0)


@dataclass
class Service:
    """A process and the addresses at which grpc.health.v1 says that it is ready; ready at once without addresses."""

    name: str
    process: Child
    addresses: Sequence[str] = ()
    security: Security = PLAIN
    ready: bool = False
    was_ready: bool = False
    started: float = 0.0
    start_at: float | None = None
    ends: list[float] = field(default_factory=list)


class ServiceFailedError(Exception):
    """A service ended and is not started again."""

    def __init__(self, service: Service, how: str) -> None:
        super().__init__(f"{service.name} {how}")
        self.service = service


Report = Callable[[Service, str], None]


class Supervisor:
    """Drives services from one thread: call `tick` a few times per second. `report` gets every change."""

    def __init__(
        self, services: Sequence[Service], report: Report, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.services = services
        self._report = report
        self._clock = clock
        self._probes = ThreadPoolExecutor(_PROBES_AT_A_TIME)

    @property
    def all_ready(self) -> bool:
        """Whether every service is healthy."""
        return all(service.ready for service in self.services)

    def start(self, service: Service) -> None:
        """Starts one service."""
        service.started, service.start_at, service.ready = self._clock(), None, False
        service.process.start()

    def tick(self) -> None:
        """Notices changes and acts. Raises ServiceFailedError when a service has failed for good."""
        waiting = []
        for service in self.services:
            if service.start_at is not None:
                if self._clock() >= service.start_at:
                    self.start(service)
            elif how := service.process.ended():
                self._ended(service, how)
            elif not service.ready:
                waiting.append(service)
        # A probe of a process that does not listen yet takes a third of a second, and a fleet has many processes.
        for service, serves in zip(waiting, self._probes.map(_serves, waiting), strict=True):
            if serves:
                service.ready = service.was_ready = True
                self._report(service, f"ready after {self._clock() - service.started:.1f} s")

    def stop(self) -> None:
        """Stops all processes, the last started first, each within its time limit. Do not call `tick` afterwards."""
        self._probes.shutdown(wait=False)
        for service in reversed(self.services):
            if service.process.ended():
                continue
            self._report(service, "stopping")
            service.process.terminate()
            self._report(service, "stopped" if service.process.wait() else "took too long and was killed")

    def hurry(self) -> None:
        """Asks every process again to end: then no process waits for running calls."""
        for service in self.services:
            service.process.terminate()

    def kill(self) -> None:
        """Ends every process at once."""
        for service in self.services:
            service.process.kill()

    def _ended(self, service: Service, how: str) -> None:
        """Restarts a service, unless it never was ready or ends too often: then it will not recover by itself."""
        now = self._clock()
        service.ready = False
        service.ends = [end for end in service.ends if now - end < RESTART_WINDOW_SECONDS] + [now]
        if not service.was_ready:
            raise ServiceFailedError(service, f"{how} before it was ready")
        if len(service.ends) > RESTARTS:
            raise ServiceFailedError(service, f"{how}, for the {len(service.ends)}th time within a minute")
        pause = BACKOFF_SECONDS[len(service.ends) - 1]
        service.start_at = now + pause
        self._report(service, f"{how}: starting it again (number {len(service.ends)} of {RESTARTS} within a minute)")


def _serves(service: Service) -> bool:
    return all(is_serving(address, service.security) for address in service.addresses)


def is_serving(address: str, security: Security = PLAIN) -> bool:
    """Whether the process at an address says that it serves."""
    with open_sync_channel(address, security) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=PROBE_SECONDS)
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
