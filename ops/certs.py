"""Makes a certificate authority for tests and certificates of the processes: `python ops/certs.py FOLDER`.

For tests and trials only: the authority's key lies unencrypted beside the certificates that it has signed.
"""

import argparse
import ipaddress
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

NAMES = ("scheduler", "cachemgr", "executor", "redis", "client")
HOSTS = ("localhost", "127.0.0.1", "::1")
# The clocks of other machines may be slow.
EARLIER = timedelta(hours=1)


@dataclass(frozen=True)
class Pair:
    """A certificate and its key, as files NAME.pem and NAME.key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    def write(self, folder: Path, name: str) -> tuple[Path, Path]:
        """Writes both files, the key only for its owner; returns their paths."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
        certificate.write_bytes(self.certificate.public_bytes(serialization.Encoding.PEM))
        key.touch(mode=0o600)
        key.write_bytes(
            self.key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return certificate, key


def authority(name: str = "kvkeep test CA", *, lifetime: timedelta = timedelta(days=365)) -> Pair:
    """A new certificate authority."""
    key = ec.generate_private_key(ec.SECP256R1())
    constraints = x509.BasicConstraints(ca=True, path_length=0)
    builder = _builder(name, name, key, key, lifetime).add_extension(constraints, critical=True)
    return Pair(builder.add_extension(_usage(signs=True), critical=True).sign(key, hashes.SHA256()), key)


def certificate(
    ca: Pair, name: str, hosts: Sequence[str] = HOSTS, *, lifetime: timedelta = timedelta(days=365)
) -> Pair:
    """A certificate for both ends of a connection. With a lifetime below zero, the certificate has expired."""
    key = ec.generate_private_key(ec.SECP256R1())
    issuer = ca.certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value
    ends = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    builder = (
        _builder(name, str(issuer), key, ca.key, lifetime)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False)
        .add_extension(x509.ExtendedKeyUsage(ends), critical=False)
    )
    return Pair(builder.sign(ca.key, hashes.SHA256()), key)


def _builder(
    subject: str,
    issuer: str,
    key: ec.EllipticCurvePrivateKey,
    issuer_key: ec.EllipticCurvePrivateKey,
    lifetime: timedelta,
) -> x509.CertificateBuilder:
    end = datetime.now(UTC) + lifetime
    signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key())
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(datetime.now(UTC), end) - EARLIER)
        .not_valid_after(end)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(signer, critical=False)
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def main() -> int:
    """Makes the files; returns the exit status."""
    parser = argparse.ArgumentParser(description="Makes a test CA and certificates of the processes.")
    parser.add_argument("folder", type=Path, help="folder for the files")
    parser.add_argument("--host", action="append", default=[], help="another name or address of the machines")
    parser.add_argument("--days", type=int, default=365, help="how long the certificates are valid")
    asked = parser.parse_args()
    if (asked.folder / "ca.key").exists():
        print(f"{asked.folder} has certificates already", file=sys.stderr)
        return 1
    lifetime = timedelta(days=asked.days)
    ca = authority(lifetime=lifetime)
    ca.write(asked.folder, "ca")
    for name in NAMES:
        certificate(ca, name, [*HOSTS, *asked.host], lifetime=lifetime).write(asked.folder, name)
    folder = asked.folder.absolute()
    print(f"KVKEEP_TLS_CA_FILE={folder}/ca.pem")
    print(f"KVKEEP_TLS_CLIENT_CA_FILE={folder}/ca.pem")
    for name in NAMES:
        print(f"{name}: KVKEEP_TLS_CERT_FILE={folder}/{name}.pem KVKEEP_TLS_KEY_FILE={folder}/{name}.key")
    return 0


if __name__ == "__main__":
    sys.exit(main())
