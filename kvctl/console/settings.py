"""Settings of the console, KVKEEP_CONSOLE_<NAME> beside the shared ones."""

from typing import ClassVar

from pydantic import Field

from protos.rpc.settings import MetricsAddress, ProcessSettings


class ConsoleSettings(ProcessSettings):
    """Read once by `kvctl console`."""

    process: ClassVar[str] = "console"
    listens_on: ClassVar[tuple[str, ...]] = ("address",)

    address: MetricsAddress = Field(
        "127.0.0.1:9112",
        description="Where `kvctl console` serves browsers, read only; if it is empty, run-stack starts no console.",
    )
