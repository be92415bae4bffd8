"""Certificates and tokens that a process shows, and that it asks for. On one machine, none are needed."""

import ssl
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import grpc

from protos.rpc.addresses import AddressError, is_loopback
from protos.rpc.files import Reloaded, read_secret
from protos.rpc.tokens import Tokens


@dataclass(frozen=True)
class Security:
    """The settings of the same names in `ProcessSettings`, which describes them."""

    insecure: bool = False
    tls_cert_file: Path | None = None
    tls_key_file: Path | None = None
    tls_ca_file: Path | None = None
    tls_client_ca_file: Path | None = None
    token_file: Path | None = None
    tokens_file: Path | None = None
    audit_file: Path | None = None

    def check(self) -> None:
        """Reads all files once. Raises ValueError, which names the setting at fault."""
        for field, needed in (
            ("tls_cert_file", "tls_key_file"),
            ("tls_key_file", "tls_cert_file"),
            ("tls_cert_file", "tls_ca_file"),
            ("tls_client_ca_file", "tls_cert_file"),
        ):
            if getattr(self, field) is not None and getattr(self, needed) is None:
                raise ValueError(f"{_variable(needed)}: must be given with {_variable(field)}")
        try:
            for field in ("tls_ca_file", "tls_client_ca_file"):
                if path := getattr(self, field):
                    _check_authorities(path)
            field = "tls_key_file"
            if self.tls_cert_file is not None:
                _ = self._certificate
            field = "token_file"
            if self.token_file is not None:
                _ = self._token
            field = "tokens_file"
            if self.tokens_file is not None:
                Tokens(self.tokens_file)
        except OSError as error:
            # The library for certificates does not name the file.
            path = Path(error.filename or getattr(self, field))
            if path == self.tls_cert_file:
                field = "tls_cert_file"
            raise ValueError(f"{_variable(field)}: cannot read {path}: {error.strerror or error}") from error
        except ValueError as error:
            raise ValueError(f"{_variable(field)}: {error}") from error

    @property
    def serves_tls(self) -> bool:
        """Whether servers of this process speak only TLS."""
        return self.tls_cert_file is not None

    @property
    def may_be_reached(self) -> bool:
        """Whether servers of this process may listen on addresses that other machines can reach."""
        return self.insecure or self.serves_tls

    @property
    def asks_callers(self) -> bool:
        """Whether callers need a certificate or a token."""
        return self.tls_client_ca_file is not None or self.tokens_file is not None

    @cached_property
    def _certificate(self) -> Reloaded[tuple[bytes, bytes]]:
        """Key and certificate chain."""
        assert self.tls_cert_file is not None
        assert self.tls_key_file is not None
        cert_file, key_file = self.tls_cert_file, self.tls_key_file

        def read() -> tuple[bytes, bytes]:
            key = read_secret(key_file).encode()
            try:
                # An empty password, so that a needed password is not asked for at a terminal.
                ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert_file, key_file, password="")
            except ssl.SSLError as error:
                raise ValueError(
                    f"{cert_file} and {key_file} are no certificate with its key: {error.reason}"
                ) from error
            return key, cert_file.read_bytes()

        return Reloaded((cert_file, key_file), read)

    @cached_property
    def _token(self) -> Reloaded[str]:
        assert self.token_file is not None
        path = self.token_file

        def read() -> str:
            token = read_secret(path).strip()
            if not token or not token.isascii() or not token.isprintable() or " " in token:
                raise ValueError(f"{path} must hold one token and nothing else")
            return token

        return Reloaded((path,), read)

    def server_credentials(self) -> grpc.ServerCredentials:
        """Makes credentials for servers that speak TLS. New connections get a renewed certificate."""
        certificate = self._certificate
        client_cas = None if self.tls_client_ca_file is None else self.tls_client_ca_file.read_bytes()

        def configuration(pair: tuple[bytes, bytes]) -> grpc.ServerCertificateConfiguration:
            return grpc.ssl_server_certificate_configuration([pair], root_certificates=client_cas)

        shown = certificate.get()

        # Returns None for no change, which grpc's types omit.
        def renewed() -> Any:
            nonlocal shown
            pair = certificate.get()
            if pair is shown:
                return None
            shown = pair
            return configuration(pair)

        return grpc.dynamic_ssl_server_credentials(
            configuration(shown), renewed, require_client_authentication=client_cas is not None
        )

    def channel_credentials(self, address: str) -> grpc.ChannelCredentials | None:
        """Makes a channel's credentials; None without TLS. Raises AddressError if a token would travel in the clear."""
        if self.tls_ca_file is not None:
            key, chain = self._certificate.get() if self.tls_cert_file is not None else (None, None)
            return grpc.ssl_channel_credentials(self.tls_ca_file.read_bytes(), key, chain)
        self.check_target(address)
        return None

    def check_target(self, address: str) -> None:
        """Raises AddressError if this process's token would reach another machine without TLS, unless `insecure`."""
        if self.token_file is not None:
            self.check_private(address)

    def check_private(self, address: str) -> None:
        """Raises AddressError if a token would reach another machine without TLS, unless `insecure`."""
        if self.tls_ca_file is None and not self.insecure and not is_loopback(address):
            raise AddressError(
                f"{address} would get a token without TLS: give KVKEEP_TLS_CA_FILE, or allow it with KVKEEP_INSECURE=1"
            )

    def token(self) -> str:
        """The token of this process; empty for none."""
        return "" if self.token_file is None else self._token.get()


def _check_authorities(path: Path) -> None:
    """Raises ValueError and OSError unless the path is a file of PEM certificates."""
    try:
        ssl.create_default_context(cafile=path)
    except ssl.SSLError as error:
        raise ValueError(f"{path} holds no PEM certificates: {error.reason}") from error


def _variable(field: str) -> str:
    return f"KVKEEP_{field.upper()}"


# Neither certificates nor tokens.
PLAIN = Security()
