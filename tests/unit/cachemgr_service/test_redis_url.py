"""Token ids and salts of all tenants lie in Redis: to another machine they travel with TLS, or a setting says so."""

import pytest

from cachemgr.settings import CachemgrSettings
from protos.rpc.settings import SettingsError, load


@pytest.mark.parametrize(
    "url",
    [
        "redis://:secret@10.1.2.3:6379/0",
        "redis://cache.internal",
        "redis:///0?host=10.1.2.3",
        "redis+cluster://:secret@127.0.0.1:6379,10.1.2.3:6379",
    ],
)
def test_redis_of_another_machine_needs_tls_or_a_word(url: str) -> None:
    with pytest.raises(SettingsError, match=r"^KVKEEP_REDIS_URL: .* without TLS: .*KVKEEP_INSECURE=1") as refused:
        load(CachemgrSettings, {"KVKEEP_REDIS_URL": url})
    assert "secret" not in str(refused.value)
    assert load(CachemgrSettings, {"KVKEEP_REDIS_URL": url, "KVKEEP_INSECURE": "1"}).redis_url == url


@pytest.mark.parametrize(
    "url",
    [
        "",
        "redis://:secret@127.0.0.1:6379/0",
        "redis://[::1]:6379",
        "redis://localhost",
        "redis://",
        "unix:///run/redis.sock",
        "rediss://:secret@10.1.2.3:6379/0?ssl_ca_certs=/etc/ca.pem",
        "redis+cluster://127.0.0.1:6379,[::1]:6380",
        "rediss+cluster://10.1.2.3:6379,10.1.2.4:6379",
    ],
)
def test_redis_of_this_machine_or_with_tls_needs_nothing(url: str) -> None:
    assert load(CachemgrSettings, {"KVKEEP_REDIS_URL": url}).redis_url == url
