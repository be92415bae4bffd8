"""Options that several verbs share, and the reading of their values."""

import getpass
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from google.protobuf.duration_pb2 import Duration

from kvctl.session import Session
from protos.generation.v1 import generation_pb2
from protos.kvcache.v1 import kvcache_pb2 as pb
from protos.rpc.durations import MAX_SECONDS

T = TypeVar("T")

Salt = Annotated[str | None, typer.Option(help="Under this salt.")]
Adapter = Annotated[int | None, typer.Option(min=0, help="Of this LoRA adapter.")]
Executor = Annotated[str, typer.Option(help="Of this executor; by default of all.")]
Pool = Annotated[str, typer.Option(help="Pool as `kvctl pools` names it; by default all pools.")]
Limit = Annotated[int, typer.Option(min=0, help="List at most this number; 0 for all.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the effects of the call, and change nothing.")]

# Options of verbs that read metrics, `--scheduler-metrics` and so on.
SchedulerMetrics = Annotated[
    str, typer.Option(envvar="KVKEEP_SCHEDULER_METRICS_ADDRESS", help="Where the scheduler's metrics are.")
]
ExecutorMetrics = Annotated[
    str, typer.Option(envvar="KVKEEP_EXECUTOR_METRICS_ADDRESS", help="Where the executor's metrics are.")
]
RouterMetrics = Annotated[
    str, typer.Option(envvar="KVKEEP_ROUTER_METRICS_ADDRESS", help="Where the router's metrics are.")
]
CachemgrMetrics = Annotated[
    str, typer.Option(envvar="KVKEEP_CACHEMGR_METRICS_ADDRESS", help="Where the cache manager's metrics are.")
]

TIERS = {"device": pb.TIER_DEVICE, "host": pb.TIER_HOST, "disk": pb.TIER_DISK}

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?(?:ms|s|m|h|d))+")


def duration_of(text: str, option: str) -> Duration:
    """A time such as 90s, 1h30m or 2d. Raises typer.BadParameter."""
    if not _DURATION.fullmatch(text):
        raise typer.BadParameter(f"{text!r} is no time such as 90s, 1h30m or 2d", param_hint=option)
    seconds = sum(float(number) * _UNITS[unit] for number, unit in re.findall(r"([\d.]+)(ms|s|m|h|d)", text))
    if seconds > MAX_SECONDS:
        raise typer.BadParameter(f"{text!r} is longer than 10,000 years", param_hint=option)
    made = Duration()
    made.FromNanoseconds(round(seconds * 1e9))
    return made


@dataclass(frozen=True)
class Prompt:
    """Options that give a prompt, in one of four ways."""

    tokens: Annotated[str | None, typer.Option(help="Token ids of a prompt: 1,2,3.")] = None
    file: Annotated[
        str | None, typer.Option("--file", help="File with the token ids of a prompt; - for standard input.")
    ] = None
    text: Annotated[
        str | None, typer.Option(help="Plain text of a prompt, which the scheduler tokenizes; - for standard input.")
    ] = None
    chat: Annotated[str | None, typer.Option(help="A user's message: a conversation of one message, as a prompt.")] = (
        None
    )

    def token_ids(self, session: Session) -> list[int] | None:
        """The token ids of the prompt; None if no prompt is given. Raises typer.BadParameter, CommandError."""
        names = [f"--{name}" for name, value in vars(self).items() if value is not None]
        if len(names) > 1:
            said = f"a prompt is given in one way, not by {' and '.join(names)}"
            raise typer.BadParameter(said, param_hint=names[-1])
        if self.tokens is not None:
            return _ids(self.tokens, "--tokens")
        if self.file is not None:
            return _ids(_read(self.file), "--file")
        if self.text is not None:
            text = sys.stdin.read() if self.text == "-" else self.text
            return _tokenize(session, generation_pb2.TokenizePromptRequest(text=text))
        if self.chat is not None:
            messages = [generation_pb2.ChatMessage(role="user", content=self.chat)]
            chat = generation_pb2.ChatInput(messages=messages)
            return _tokenize(session, generation_pb2.TokenizePromptRequest(chat=chat))
        return None

    def prefix(
        self, session: Session, salt: str | None, adapter: int | None, executor: str
    ) -> pb.PrefixSelector | None:
        """The prompt in its cache scope; None if no prompt is given. Raises typer.BadParameter, CommandError."""
        token_ids = self.token_ids(session)
        if token_ids is None:
            return None
        return pb.PrefixSelector(token_ids=token_ids, salt=salt, adapter_id=adapter, executor_id=executor)


@dataclass(frozen=True)
class Selection:
    """Options that select blocks by their properties."""

    salt: Salt = None
    tenant: Annotated[str | None, typer.Option(help="Of this tenant.")] = None
    session_id: Annotated[str | None, typer.Option("--session", help="Of this session.")] = None
    adapter: Adapter = None
    tier: Annotated[str, typer.Option(help="In this tier: device, host or disk.")] = ""
    max_priority: Annotated[int | None, typer.Option(min=0, max=100, help="With at most this priority.")] = None

    def filter(self, pool: str = "", prefix: pb.PrefixSelector | None = None) -> pb.BlockFilter:
        """Selects blocks that match all options and, with a prefix, belong to the prefix. Raises typer.BadParameter."""
        if self.tier and self.tier not in TIERS:
            raise typer.BadParameter(f"{self.tier!r} is none of {', '.join(TIERS)}", param_hint="--tier")
        return pb.BlockFilter(
            pool_id=pool,
            salt=self.salt,
            tenant_id=self.tenant,
            session_id=self.session_id,
            adapter_id=self.adapter,
            tier=TIERS.get(self.tier, pb.TIER_UNSPECIFIED),
            max_retention_priority=self.max_priority,
            prefix=prefix,
        )


def required(prompt: T | None) -> T:
    """Returns the prompt; raises typer.BadParameter without one."""
    if prompt is None:
        raise typer.BadParameter("name the prompt: --tokens, --file, --text or --chat", param_hint="--tokens")
    return prompt


def user() -> str:
    """The user that runs this command."""
    return getpass.getuser()


def _read(file: str) -> str:
    try:
        return sys.stdin.read() if file == "-" else Path(file).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{file}: {getattr(error, 'strerror', 'is no text')}", param_hint="--file") from None


def _ids(text: str, option: str) -> list[int]:
    """Numbers with commas or white space between them, or as a JSON array."""
    words = re.split(r"[\s,]+", text.strip().removeprefix("[").removesuffix("]").strip())
    if not all(word.isdecimal() and int(word) < 1 << 32 for word in words):
        raise typer.BadParameter("must be token ids such as 1,2,3", param_hint=option)
    return [int(word) for word in words]


def _tokenize(session: Session, request: generation_pb2.TokenizePromptRequest) -> list[int]:
    remote = session.scheduler
    return list(remote.call(remote.stub.TokenizePrompt, request).token_ids)
