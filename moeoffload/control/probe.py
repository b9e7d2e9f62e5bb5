"""Finds out why a connection to an expert server fails: gRPC only reports that it does."""

from __future__ import annotations

import functools
import socket
import ssl
from typing import Final

from moeoffload.config import Address
from moeoffload.control.credentials import HostCredentials
from moeoffload.last_resort import answer_within
from moeoffload.text import one_line

PROBE_S: Final = 1.0
_LISTEN_S: Final = 0.5
"""How long a server may take to reject a certificate after the handshake, as TLS 1.3 allows."""
_WRONG_NAME: Final = (62, 64)
"""OpenSSL's X509_V_ERR_HOSTNAME_MISMATCH and X509_V_ERR_IP_ADDRESS_MISMATCH."""
_NOT_TLS: Final = {"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNKNOWN_PROTOCOL", "RECORD_LAYER_FAILURE"}


def why_not(address: str, credentials: HostCredentials, timeout_s: float) -> str | None:
    """Returns why the server at ``address`` (HOST:PORT) and this host reject each other; None if that is not the
    problem, or not known within ``timeout_s`` seconds; only name resolution takes longer than a second or two.
    Raises ConnectionRefusedError: nothing listens there."""
    try:
        return answer_within(timeout_s, "probe", functools.partial(_look, Address(address), credentials))
    except ConnectionRefusedError:
        raise
    except OSError:  # a timeout, too
        return None


def _look(place: Address, credentials: HostCredentials) -> str | None:
    try:
        connection = socket.create_connection((place.host, place.port), PROBE_S)
    except socket.gaierror as error:
        return f"no machine of the name {one_line(place.host, 253)} is known ({error.strerror})"
    with connection:
        if credentials.context is None:
            return _why_not_plain(connection)
        return _why_not_tls(connection, credentials.context, credentials.cert is not None, place.host)


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
    return "it speaks TLS; give --tls-ca FILE, and --tls-cert and --tls-key if it wants to know its hosts"


def _why_not_tls(connection: socket.socket, context: ssl.SSLContext, has_cert: bool, host: str) -> str | None:
    objection = (
        "it does not accept this host's --tls-cert; its --client-ca must be the one that made it"
        if has_cert
        else "it wants a certificate of this host; give --tls-cert and --tls-key"
    )
    try:
        with context.wrap_socket(connection, server_hostname=host) as tls:
            tls.settimeout(_LISTEN_S)
            try:
                return None if tls.recv(1) else objection
            except TimeoutError:
                return None
            except OSError:  # an alert, or the connection is gone
                return objection
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
        if "ALERT" in reason:
            return objection
        return f"the TLS handshake failed ({reason.lower().replace('_', ' ') or error})"
