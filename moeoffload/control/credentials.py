"""The credentials of both sides of the control plane: certificates and tokens, read from files.

Secrets are kept out of reprs, and nothing here logs.
"""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc

from moeoffload.config import Address, ExpertServerSettings, HostSettings, bracketed, is_loopback
from moeoffload.control.user_token import new_token, numeric_loopback, user_tokens
from moeoffload.errors import SettingError

TOKEN_KEY: Final = "moeoffload-token"
"""The metadata key of a token; without TLS the token is readable on the wire."""
LEAST_TOKEN: Final = 16
MOST_TOKEN: Final = 1024


@dataclass(frozen=True)
class HostCredentials:
    """The credentials that a host presents, and the CA it trusts; without ``ca`` the connection is plain TCP."""

    ca: bytes | None = None
    cert: bytes | None = None
    key: bytes | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    context: ssl.SSLContext | None = field(default=None, repr=False, compare=False)
    """The same certificates for Python's own TLS, which can report why a handshake failed."""

    @classmethod
    def of(cls, settings: HostSettings) -> HostCredentials:
        """Reads the files named in the settings.
        Raises SettingError: the settings do not go together, or a file does not hold what it should."""
        settings.check_security(settings.experts)
        context = None
        if settings.tls_ca is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            _load_ca(context, settings.tls_ca, "--tls-ca")
            context.set_alpn_protocols(["h2"])
            if settings.tls_cert is not None and settings.tls_key is not None:
                load_pair(context, settings.tls_cert, settings.tls_key)
        return cls(
            ca=_read(settings.tls_ca),
            cert=_read(settings.tls_cert),
            key=_read(settings.tls_key),
            token=read_token(settings.token_file) if settings.token_file is not None else None,
            context=context,
        )

    def channel(self, address: str, options: Sequence[tuple[str, Any]]) -> grpc.Channel:
        """Creates a channel to ``address`` (HOST:PORT)."""
        if self.ca is not None:
            tls = grpc.ssl_channel_credentials(self.ca, self.key, self.cert)
            return grpc.secure_channel(address, tls, options=options)
        place = Address.parse(address)
        return grpc.insecure_channel(f"{bracketed(numeric_loopback(place.host))}:{place.port}", options)

    def metadata(self, address: str) -> tuple[tuple[str, str], ...]:
        """Returns the metadata of a call to ``address`` (HOST:PORT): all tokens that this host has for it.

        Called for every call: a server may start, or restart, after the channel was created.
        """
        place = Address.parse(address)
        tokens = [self.token] if self.token is not None else []
        if is_loopback(place.host):
            tokens += user_tokens(place.host, place.port)
        return tuple((TOKEN_KEY, token) for token in tokens)


@dataclass(frozen=True)
class ServerCredentials:
    """The credentials that a server demands of hosts."""

    tls: grpc.ServerCredentials | None = field(default=None, repr=False)
    """TLS, or None for plain TCP; hosts must present a certificate if the settings name a CA for hosts."""
    token: str | None = field(default=None, repr=False)
    same_user: bool = False
    """Whether hosts are processes of the same user on this machine, for which the server generates a token."""
    encrypt_rows: bool = False
    """Whether the stream transport is encrypted. Not for the same user on one machine, who could read it anyway."""
    any_model: bool = False
    """Whether hosts may name any model that the server can read: the same user can read it anyway."""

    @classmethod
    def of(cls, settings: ExpertServerSettings) -> ServerCredentials:
        """Reads the files named in the settings.
        Raises SettingError: the settings do not go together, or a file does not hold what it should."""
        settings.check_security(settings.listen)
        tls = None
        if settings.tls_cert is not None and settings.tls_key is not None:
            # Read by Python's ssl first: gRPC would not say what is wrong with them.
            trial = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            load_pair(trial, settings.tls_cert, settings.tls_key)
            if settings.client_ca is not None:
                _load_ca(trial, settings.client_ca, "--client-ca")
            pair = settings.tls_key.read_bytes(), settings.tls_cert.read_bytes()
            tls = grpc.ssl_server_credentials([pair], _read(settings.client_ca), settings.client_ca is not None)
        same_user = settings.is_for_same_user(settings.listen)
        token = new_token() if same_user else None
        if settings.token_file is not None:
            token = read_token(settings.token_file)
        return cls(
            tls=tls,
            token=token,
            same_user=same_user,
            encrypt_rows=tls is not None or not same_user,
            any_model=same_user and not settings.model_root,
        )


def read_token(path: Path, flag: str = "--token-file") -> str:
    """Reads the token in the file that setting ``flag`` names, without surrounding white space.
    Raises SettingError: the file cannot be read, or holds no token. The message does not show its contents."""
    try:
        token = path.read_bytes()[: MOST_TOKEN + 64].decode("ascii").strip()
    except (OSError, UnicodeDecodeError):
        token = ""
    if not LEAST_TOKEN <= len(token) <= MOST_TOKEN or not token.isprintable() or " " in token:
        raise SettingError(
            f"{flag}: {path} holds no token; allowed are {LEAST_TOKEN} to {MOST_TOKEN} ASCII characters in one "
            "word, for instance what `openssl rand -hex 32` prints"
        )
    return token


def _read(path: Path | None) -> bytes | None:
    return path.read_bytes() if path is not None else None


def _load_ca(context: ssl.SSLContext, path: Path, flag: str) -> None:
    try:
        context.load_verify_locations(path)
    except (ssl.SSLError, OSError):
        raise SettingError(f"{flag}: {path} holds no certificates in PEM format") from None


def load_pair(context: ssl.SSLContext, cert: Path, key: Path, flags: str = "--tls") -> None:
    """Loads a certificate and its key into ``context``; they come from the settings whose flags begin with ``flags``.
    Raises SettingError: they are not a certificate and its key, or the key has a password."""

    def no_password() -> str:
        raise SettingError(f"{flags}-key: {key} is locked with a password; give a key without one")

    try:
        context.load_cert_chain(cert, key, no_password)
    except (ssl.SSLError, OSError):
        raise SettingError(
            f"{flags}-cert and {flags}-key: {cert} and {key} are no certificate and its key, in PEM"
        ) from None
