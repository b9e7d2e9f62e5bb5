"""Access to the HTTP server: key, TLS and socket, all checked before a model is loaded."""

from __future__ import annotations

import errno
import socket
import ssl

from moeoffload.config import ServeSettings
from moeoffload.control.credentials import load_pair, read_token
from moeoffload.errors import SettingError


def check_access(settings: ServeSettings) -> None:
    """Checks that a server with these settings may be opened to clients, and that the files they name are valid.
    Raises SettingError: they may not, or a file is not valid."""
    settings.check_http()
    read_api_key(settings)
    tls_context(settings)


def read_api_key(settings: ServeSettings) -> str | None:
    """The key that clients must present; None if none is required. Raises SettingError: the file holds no key."""
    return read_token(settings.api_key_file, "--api-key-file") if settings.api_key_file is not None else None


def tls_context(settings: ServeSettings) -> ssl.SSLContext | None:
    """The TLS context of connections; None if they are not encrypted.
    Raises SettingError: the files do not hold a certificate and its key."""
    cert, key = settings.http_tls_cert, settings.http_tls_key
    if cert is None or key is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    load_pair(context, cert, key, "--http-tls")
    return context


def bind_socket(settings: ServeSettings) -> socket.socket:
    """The bound socket of the server; it does not listen yet.
    Raises SettingError: the port is in use, or the address is not this machine's."""
    try:
        found = socket.getaddrinfo(settings.bind, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise SettingError(f"--bind: {settings.bind} is no address of this machine ({error.strerror})") from None
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        # A server that has just stopped must not keep the next one from its port.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise SettingError(f"--bind: {settings.bind} is no address of this machine") from None
        raise SettingError(
            f"--port: cannot listen at {settings.bind}, port {settings.port} ({error.strerror}); give another --port, "
            "or 0 for a free one"
        ) from None
    return listener
