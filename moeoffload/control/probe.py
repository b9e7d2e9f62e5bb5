"""Finds out why a connection to an expert server does not come about: gRPC only says that it does not."""

from __future__ import annotations

import contextlib
import socket
import ssl
from typing import Final

from moeoffload.settings import Address

PROBE_S: Final = 2.0
_LISTEN_S: Final = 0.5
"""How long a server may take to object to a certificate after the handshake, which TLS 1.3 allows it to."""
_WRONG_NAME: Final = (62, 64)
"""OpenSSL's X509_V_ERR_HOSTNAME_MISMATCH and X509_V_ERR_IP_ADDRESS_MISMATCH."""
_NOT_TLS: Final = {"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNKNOWN_PROTOCOL", "RECORD_LAYER_FAILURE"}


def why_not(address: str, context: ssl.SSLContext | None, timeout_s: float) -> str | None:
    """Why the server at ``address`` and this host do not accept each other; None if that is not what is wrong.

    Args:
        address: HOST:PORT.
        context: how this host does TLS; None if it talks plain TCP.
        timeout_s: deadline in seconds; 2 seconds are enough.
    """
    place = Address(address)
    try:
        connection = socket.create_connection((place.host, place.port), min(timeout_s, PROBE_S))
    except OSError:
        return None
    with connection:
        return _why_not_plain(connection) if context is None else _why_not_tls(connection, context, place.host)


def _why_not_plain(connection: socket.socket) -> str | None:
    curious = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    curious.check_hostname, curious.verify_mode = False, ssl.CERT_NONE
    curious.set_alpn_protocols(["h2"])
    try:
        with curious.wrap_socket(connection):
            pass
    except ssl.SSLError as error:
        if "ALERT" not in (error.reason or ""):
            return None
    except OSError:
        return None
    return "it speaks TLS; give --tls-ca FILE, and --tls-cert and --tls-key if it wants to know its hosts"


def _why_not_tls(connection: socket.socket, context: ssl.SSLContext, host: str) -> str | None:
    try:
        with context.wrap_socket(connection, server_hostname=host) as tls:
            tls.settimeout(_LISTEN_S)
            with contextlib.suppress(TimeoutError):
                tls.recv(1)
            return None
    except ssl.SSLCertVerificationError as error:
        if error.verify_code in _WRONG_NAME:
            return (
                f"its certificate is not for {host}; make one with `moeoffload keys new DIR --name {host}`, "
                "or use a name that it has"
            )
        return f"its certificate is not one that --tls-ca vouches for ({error.verify_message})"
    except ssl.SSLError as error:
        reason = error.reason or ""
        if reason in _NOT_TLS:
            return "it does not speak TLS; start it with --tls-cert and --tls-key, or leave --tls-ca out"
        if "CERTIFICATE_REQUIRED" in reason or "HANDSHAKE_FAILURE" in reason:
            return "it wants a certificate of this host; give --tls-cert and --tls-key"
        if "ALERT" in reason:
            return f"it does not accept this host's --tls-cert ({reason.lower().replace('_', ' ')})"
        return f"the TLS handshake failed ({reason.lower().replace('_', ' ') or error})"
    except OSError:
        return None
