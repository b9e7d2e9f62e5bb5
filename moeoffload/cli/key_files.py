"""Makes a private CA, a server certificate and a host certificate, with which two machines trust each other.

The CA's private key is not kept: no further certificates can be made with it later, and a leaked folder exposes only
these two. A third machine gets a copy of the host's pair, or everything is made again.
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
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from moeoffload.config.values import read_host
from moeoffload.errors import SettingError

VALID: Final = datetime.timedelta(days=730)
_EARLIER: Final = datetime.timedelta(hours=1)
"""Certificates are valid from a little before now, because the clocks of two machines differ."""
NAMES: Final = ("ca.pem", "server.pem", "server.key", "host.pem", "host.key")
_LOCAL_NAMES: Final = ("localhost", "127.0.0.1", "::1")


def make_keys(folder: Path, names: Sequence[str]) -> list[str]:
    """Writes ca.pem, server.pem, server.key, host.pem and host.key; returns the names in the server's certificate.

    ``folder`` is created if missing, for its owner only. The names are ``names`` and this machine's own.
    Raises SettingError: a file exists already, the folder cannot be written, or a name is no host name or address.
    """
    subjects = list(dict.fromkeys([*_LOCAL_NAMES, socket.gethostname().lower(), *(_checked(name) for name in names)]))
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        there = [folder / name for name in NAMES if (folder / name).exists()]
    except OSError as error:
        raise SettingError(f"keys new: {folder} cannot be made or looked into ({error.strerror})") from None
    if there:
        raise SettingError(f"keys new: {there[0]} is there already; name another folder, nothing is replaced")
    ca_key, server_key, host_key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(3))
    ca = _certificate("moeoffload private CA", ca_key, None, ca_key)
    server = _certificate("moeoffload server", server_key, ca, ca_key, subjects)
    host = _certificate("moeoffload host", host_key, ca, ca_key)
    contents: tuple[x509.Certificate | ec.EllipticCurvePrivateKey, ...] = ca, server, server_key, host, host_key
    for name, content in zip(NAMES, contents, strict=True):
        _write(folder / name, content)
    return subjects


def _checked(name: str) -> str:
    try:
        return read_host(name)
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
        # Servers and hosts: digital signatures. The CA: only to sign certificates and revocation lists.
        .add_extension(x509.KeyUsage(not is_ca, False, False, False, False, is_ca, is_ca, False, False), critical=True)
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


def _write(path: Path, content: x509.Certificate | ec.EllipticCurvePrivateKey) -> None:
    """Creates a PEM file; a private key is readable by its owner only. An existing file is an error."""
    if isinstance(content, x509.Certificate):
        mode, data = 0o644, content.public_bytes(Encoding.PEM)
    else:
        mode, data = 0o600, content.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
    except OSError as error:
        raise SettingError(f"keys new: {path} cannot be written ({error.strerror})") from None
