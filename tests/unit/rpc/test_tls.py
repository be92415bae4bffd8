"""TLS and mTLS between a real server and real channels, and their refusals."""

import asyncio
import ssl
import time
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from urllib.error import HTTPError

import certs
import grpc
import pytest

from protos.kvcache.v1 import kvcache_pb2 as pb
from protos.kvcache.v1 import kvcache_pb2_grpc as pb_grpc
from protos.rpc import files
from protos.rpc.channel import open_channel, open_sync_channel
from protos.rpc.security import PLAIN, Security
from protos.rpc.settings import ProcessSettings, SettingsError, load
from tests.support.patience import patience
from tests.support.ports import free_address
from tests.unit.rpc import conftest

CA = certs.authority()


def made(folder: Path, name: str = "peer", ca: certs.Pair = CA, **options: object) -> Security:
    """Settings of a process with its own certificate, which trusts CA."""
    trusted, _ = CA.write(folder, "ca")
    cert, key = certs.certificate(ca, name, **options).write(folder, name)
    return Security(tls_cert_file=cert, tls_key_file=key, tls_ca_file=trusted)


@asynccontextmanager
async def serving(security: Security, address: str = "127.0.0.1:0", metrics: str = "") -> AsyncIterator[str]:
    async with conftest.serving(address, security=security, metrics_address=metrics) as server:
        yield server.addresses[0]


async def answers(address: str, security: Security) -> bool:
    """Whether a call succeeds; only the connection can fail."""
    async with open_channel(address, security) as channel:
        stub: pb_grpc.CacheAdminServiceAsyncStub = pb_grpc.CacheAdminServiceStub(channel)
        call = stub.PurgeBlocks(pb.PurgeBlocksRequest(), timeout=patience(10))
        code = await call.code()
    assert code in (grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE)
    return code is grpc.StatusCode.OK


def fetch(url: str, context: ssl.SSLContext) -> bytes:
    with urllib.request.urlopen(url, timeout=patience(10), context=context) as answer:
        return answer.read()


def refusal(url: str, context: ssl.SSLContext) -> int:
    with pytest.raises(HTTPError) as caught:
        fetch(url, context)
    with caught.value as error:
        return error.code


@pytest.mark.parametrize("kind", ["tcp", "unix"])
async def test_a_server_with_a_certificate_speaks_tls_and_nothing_else(tmp_path: Path, kind: str) -> None:
    security = made(tmp_path)
    async with serving(security, "127.0.0.1:0" if kind == "tcp" else f"unix:{tmp_path}/s") as address:
        assert await answers(address, Security(tls_ca_file=security.tls_ca_file))
        assert not await answers(address, PLAIN)


async def test_with_tls_a_server_may_be_reached_from_other_machines(tmp_path: Path) -> None:
    async with serving(made(tmp_path), "0.0.0.0:0") as address:
        assert address.startswith("0.0.0.0:")


async def test_a_channel_refuses_an_expired_a_foreign_and_a_wrongly_named_server(tmp_path: Path) -> None:
    client = Security(tls_ca_file=made(tmp_path).tls_ca_file)
    wrong = {
        "expired": made(tmp_path / "expired", lifetime=timedelta(minutes=-1)),
        "foreign": made(tmp_path / "foreign", ca=certs.authority()),
        "named": made(tmp_path / "named", hosts=["elsewhere.example"]),
    }
    for name, security in wrong.items():
        async with serving(security) as address:
            assert not await answers(address, client), name


async def test_a_mutual_server_refuses_callers_without_a_certificate_of_its_ca(tmp_path: Path) -> None:
    own = made(tmp_path)
    async with serving(replace(own, tls_client_ca_file=own.tls_ca_file)) as address:
        assert await answers(address, made(tmp_path / "good"))
        assert not await answers(address, Security(tls_ca_file=own.tls_ca_file))
        assert not await answers(address, made(tmp_path / "expired", lifetime=timedelta(minutes=-1)))
        assert not await answers(address, made(tmp_path / "foreign", ca=certs.authority()))
        with open_sync_channel(address, made(tmp_path / "sync")) as channel:
            stub: pb_grpc.CacheAdminServiceStub = pb_grpc.CacheAdminServiceStub(channel)
            assert await asyncio.to_thread(stub.PurgeBlocks, pb.PurgeBlocksRequest(), timeout=patience(10))


async def test_a_renewed_certificate_is_shown_without_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_LOOK_SECONDS", 0.0)
    security = made(tmp_path, lifetime=timedelta(minutes=-1))
    client = Security(tls_ca_file=security.tls_ca_file)
    async with serving(security) as address:
        assert not await answers(address, client)
        made(tmp_path)
        assert await answers(address, client)
        # One that cannot be used changes nothing.
        assert security.tls_key_file is not None
        security.tls_key_file.write_text("no key")
        assert await answers(address, client)


async def test_metrics_are_served_with_tls_and_ask_for_a_certificate_where_callers_need_one(tmp_path: Path) -> None:
    own, metrics = made(tmp_path), free_address()
    own = replace(own, tls_client_ca_file=own.tls_ca_file)
    foreign = made(tmp_path / "foreign", ca=certs.authority())

    def shows(shown: Security | None) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=own.tls_ca_file)
        if shown is not None:
            assert shown.tls_cert_file is not None
            context.load_cert_chain(shown.tls_cert_file, shown.tls_key_file)
        return context

    async with serving(own, metrics=metrics):
        # Without a handshake, which others need not wait for.
        _, silent = await asyncio.open_connection(*metrics.split(":"))
        for path in ("/metrics", "/", "//metrics", "/health/metrics", "/%6cive/.."):
            assert await asyncio.to_thread(refusal, f"https://{metrics}{path}", shows(None)) == 403, path
        # Supervisors have none. The server of this test never becomes ready.
        assert await asyncio.to_thread(fetch, f"https://{metrics}/live", shows(None)) == b"ok\n"
        assert await asyncio.to_thread(refusal, f"https://{metrics}/health", shows(None)) == 503
        with pytest.raises(OSError, match=r"(?i)certificate|authority|unknown_ca|reset|eof|closed"):
            await asyncio.to_thread(fetch, f"https://{metrics}/live", shows(foreign))
        assert b"kvkeep_rpc_handled" in await asyncio.to_thread(fetch, f"https://{metrics}/metrics", shows(own))
        silent.close()


def test_settings_say_which_file_is_wrong(tmp_path: Path) -> None:
    security = made(tmp_path)
    good = {
        "KVKEEP_TLS_CERT_FILE": str(security.tls_cert_file),
        "KVKEEP_TLS_KEY_FILE": str(security.tls_key_file),
        "KVKEEP_TLS_CA_FILE": str(security.tls_ca_file),
    }
    assert load(ProcessSettings, good).security == security
    for missing, left in (("TLS_KEY_FILE", "TLS_CERT_FILE"), ("TLS_CA_FILE", "TLS_CERT_FILE")):
        rest = {name: value for name, value in good.items() if not name.endswith(missing)}
        with pytest.raises(SettingsError, match=f"KVKEEP_{missing}: must be given with KVKEEP_{left}"):
            load(ProcessSettings, rest)
    (tmp_path / "empty.pem").touch()
    for name in ("TLS_CA_FILE", "TLS_CLIENT_CA_FILE"):
        with pytest.raises(SettingsError, match=rf"^KVKEEP_{name}: .*/empty\.pem holds no PEM certificates"):
            load(ProcessSettings, good | {f"KVKEEP_{name}": str(tmp_path / "empty.pem")})
    for name in ("TLS_CA_FILE", "TLS_CLIENT_CA_FILE", "TLS_CERT_FILE", "TLS_KEY_FILE", "TOKEN_FILE", "TOKENS_FILE"):
        with pytest.raises(SettingsError, match=rf"^KVKEEP_{name}: cannot read /nope: No such file or directory$"):
            load(ProcessSettings, good | {f"KVKEEP_{name}": "/nope"})
    other = made(tmp_path / "other")
    with pytest.raises(SettingsError, match=r"^KVKEEP_TLS_KEY_FILE: .* are no certificate with its key"):
        load(ProcessSettings, good | {"KVKEEP_TLS_KEY_FILE": str(other.tls_key_file)})
    Path(good["KVKEEP_TLS_KEY_FILE"]).chmod(0o644)
    with pytest.raises(SettingsError, match=r"^KVKEEP_TLS_KEY_FILE: .* has mode 644"):
        load(ProcessSettings, good)


def test_a_token_needs_tls_on_its_way_to_another_machine(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.touch(mode=0o600)
    token.write_text("kvk_x\n")
    environ = {"KVKEEP_TOKEN_FILE": str(token)}
    assert load(ProcessSettings, environ).security.token() == "kvk_x"
    far = environ | {"KVKEEP_EXECUTOR_ADDRESS": "10.0.0.1:50053"}
    with pytest.raises(SettingsError, match=r"10\.0\.0\.1:50053 would get a token without TLS"):
        load(ProcessSettings, far)
    load(ProcessSettings, far | {"KVKEEP_INSECURE": "1"})
    token.write_text("two words")
    with pytest.raises(SettingsError, match=r"KVKEEP_TOKEN_FILE: .* must hold one token") as caught:
        load(ProcessSettings, environ)
    assert "two words" not in str(caught.value)


def test_certificates_are_made_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    started = time.time()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["certs.py", str(tmp_path / "tls"), "--host", "node-1"])
        assert certs.main() == 0
        assert certs.main() == 1
    assert "KVKEEP_TLS_CA_FILE=" in capsys.readouterr().out
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "tls").glob("*.key")} == {0o600}
    assert (tmp_path / "tls").stat().st_mtime >= started - 1
