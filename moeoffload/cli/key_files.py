"""Makes a small private CA, a server and a host certificate: what two machines need to trust each other.

The CA's private key is not kept: nobody can use it to make further certificates later, and losing the folder loses no
more than these two. A third machine gets the host's pair too, or everything is made anew.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from moeoffload.config import Address
from moeoffload.errors import SettingError

VALID: Final = datetime.timedelta(days=730)
_EARLIER: Final = datetime.timedelta(hours=1)
"""Clocks of two machines differ: certificates are valid from a little before now."""
NAMES: Final = ("ca.pem", "server.pem", "server.key", "host.pem", "host.key")
_LOCAL_NAMES: Final = ("localhost", "127.0.0.1", "::1")


def make_keys(folder: Path, names: Sequence[str]) -> list[str]:
    """Writes ca.pem, server.pem, server.key, host.pem and host.key; returns the names the server's certificate is for.

    Args:
        folder: made if it is not there, for its owner only.
        names: host names and addresses under which hosts reach the server, beside this machine's own.

    Raises:
        SettingError: a file is there already, the folder cannot be written, or a name is no host name or address.
    """
    subjects = list(dict.fromkeys([*_LOCAL_NAMES, socket.gethostname().lower(), *(_checked(name) for name in names)]))
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise SettingError(f"keys new: {folder} cannot be made ({error.strerror})") from None
    for name in NAMES:
        if (folder / name).exists():
            raise SettingError(f"keys new: {folder / name} is there already; name another folder, nothing is replaced")
    ca_key, server_key, host_key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(3))
    ca = _certificate("moeoffload private CA", ca_key, None, ca_key)
    server = _certificate("moeoffload server", server_key, ca, ca_key, subjects)
    host = _certificate("moeoffload host", host_key, ca, ca_key)
    contents = (_pem(ca), _pem(server), _secret_pem(server_key), _pem(host), _secret_pem(host_key))
    for name, content in zip(NAMES, contents, strict=True):
        _write(folder / name, content, 0o600 if name.endswith(".key") else 0o644)
    return subjects


def _checked(name: str) -> str:
    try:
        bracketed = f"[{name}]" if ":" in name and not name.startswith("[") else name
        return Address.parse(f"{bracketed}:1").host
    except ValueError:
        raise SettingError(f"--name: {name!r} is no host name and no address") from None


def _certificate(
    common_name: str,
    key: ec.EllipticCurvePrivateKey,
    ca: x509.Certificate | None,
    ca_key: ec.EllipticCurvePrivateKey,
    subjects: Sequence[str] | None = None,
) -> x509.Certificate:
    """A certificate for ``key``: the CA's own if ``ca`` is None, a server's if it has ``subjects``, else a host's."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
    now = datetime.datetime.now(datetime.UTC)
    is_ca = ca is None
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name if ca is None else ca.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _EARLIER)
        .not_valid_after(now + VALID)
        .add_extension(x509.BasicConstraints(ca=is_ca, path_length=0 if is_ca else None), critical=True)
        .add_extension(_key_usage(is_ca), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
    )
    if ca is not None:
        usage = ExtendedKeyUsageOID.CLIENT_AUTH if subjects is None else ExtendedKeyUsageOID.SERVER_AUTH
        builder = builder.add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
    if subjects is not None:
        builder = builder.add_extension(x509.SubjectAlternativeName([_general(s) for s in subjects]), critical=False)
    return builder.sign(ca_key, hashes.SHA256())


def _general(subject: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(subject))
    except ValueError:
        return x509.DNSName(subject)


def _key_usage(is_ca: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not is_ca,
        key_cert_sign=is_ca,
        crl_sign=is_ca,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _secret_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write(path: Path, content: bytes, mode: int) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
    except OSError as error:
        raise SettingError(f"keys new: {path} cannot be written ({error.strerror})") from None
