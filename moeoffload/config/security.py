"""The settings about who may connect, and the rules that hold between them; no file is opened here.

A server that others can reach needs TLS and a way to know its hosts, or the word of its user that it shall be open.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from moeoffload.config.sources import Panel, Setting, SettingsBase
from moeoffload.config.values import Address, check_file_to_read, check_secret_file
from moeoffload.errors import SettingError

_FILE = "a file that can be read"
_SECRET_FILE = "a file that only its owner can read (chmod 600)"
_KEYS = "`moeoffload keys new DIR` makes them"


def read_folders(value: Any) -> Any:
    """Comma-separated text, or several paths, to a tuple of folders that exist, with links followed."""
    if isinstance(value, str):
        value = value.split(",")
    if not isinstance(value, Iterable):
        return value
    folders = []
    for part in value:
        text = str(part).strip()
        folder = Path(os.path.realpath(os.path.expanduser(text))) if text and "\0" not in text else None
        if folder is None or not folder.is_dir():
            raise ValueError(f"{text!r} is no folder")
        folders.append(folder)
    return tuple(folders)


class SecuritySettings(SettingsBase):
    """What a host and an expert server both have."""

    tls_cert: Annotated[
        Path | None,
        AfterValidator(check_file_to_read),
        Field(description="This side's certificate, PEM."),
        Setting(allowed=_FILE, metavar="FILE", panel=Panel.SECURITY),
    ] = None
    tls_key: Annotated[
        Path | None,
        AfterValidator(check_secret_file),
        Field(description="The private key of that certificate, PEM."),
        Setting(allowed=_SECRET_FILE, metavar="FILE", panel=Panel.SECURITY),
    ] = None
    token_file: Annotated[
        Path | None,
        AfterValidator(check_secret_file),
        Field(description="The file that holds the token which hosts show to servers."),
        Setting(allowed=_SECRET_FILE, metavar="FILE", panel=Panel.SECURITY),
    ] = None
    insecure: Annotated[
        bool,
        Field(description="Allow connections between machines without TLS, and servers that anybody can use."),
        Setting(panel=Panel.SECURITY),
    ] = False

    def _check_pair(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            given, missing = ("tls-cert", "tls-key") if self.tls_key is None else ("tls-key", "tls-cert")
            raise SettingError(f"--{given} needs --{missing}: a certificate and its private key go together; {_KEYS}")


class HostSecuritySettings(SecuritySettings):
    """How a host reaches servers that it did not start itself."""

    tls_ca: Annotated[
        Path | None,
        AfterValidator(check_file_to_read),
        Field(description="The certificates of who may vouch for a server, PEM; with it, servers are reached by TLS."),
        Setting(allowed=_FILE, default_means="no TLS", metavar="FILE", panel=Panel.SECURITY),
    ] = None

    def check_security(self, servers: Iterable[Address]) -> None:
        """Whether these settings may be used to reach ``servers``.

        Raises:
            SettingError: they do not go together, or rows or the token would travel in the clear.
        """
        self._check_pair()
        if self.tls_cert is not None and self.tls_ca is None:
            raise SettingError(f"--tls-cert needs --tls-ca, the certificate of who vouches for the servers; {_KEYS}")
        if self.tls_ca is not None or self.insecure:
            return
        for address in servers:
            if not is_loopback(address.host):
                raise SettingError(
                    f"--experts: {address} is on another machine and this host would talk to it without TLS; give "
                    f"--tls-ca FILE ({_KEYS}), or say --insecure if nobody else is on that network"
                )


class ServerSecuritySettings(SecuritySettings):
    """Whom an expert server lets in, and what they may ask for."""

    client_ca: Annotated[
        Path | None,
        AfterValidator(check_file_to_read),
        Field(description="The certificates of who may vouch for a host, PEM; with it, hosts need a certificate."),
        Setting(allowed=_FILE, metavar="FILE", panel=Panel.SECURITY),
    ] = None
    model_root: Annotated[
        tuple[Path, ...],
        BeforeValidator(read_folders),
        Field(description="Folders below which hosts may name models for this server to read."),
        Setting(
            allowed="a folder that exists, or several with commas between",
            default_means="models in the hub cache only; any for hosts of the same user on this machine",
            metavar="FOLDER,...",
            panel=Panel.SECURITY,
        ),
    ] = ()

    def check_security(self, listen: Address) -> None:
        """Whether a server with these settings may listen there.

        Raises:
            SettingError: they do not go together, or the server would be open to others.
        """
        self._check_pair()
        if self.client_ca is not None and self.tls_cert is None:
            raise SettingError(f"--client-ca needs --tls-cert and --tls-key: it is a part of TLS; {_KEYS}")
        if is_loopback(listen.host) or self.insecure or (self.tls_cert is not None and self.has_credential):
            return
        missing = []
        if self.tls_cert is None:
            missing.append("--tls-cert and --tls-key")
        if not self.has_credential:
            missing.append("--client-ca (or --token-file FILE)")
        raise SettingError(
            f"--listen: {listen} can be reached from other machines, which needs {' and '.join(missing)}; "
            "`moeoffload keys new DIR` makes the files and prints the commands; --insecure lets everybody in"
        )

    @property
    def has_credential(self) -> bool:
        """Whether hosts have to show something: a certificate or the token."""
        return self.client_ca is not None or self.token_file is not None

    def is_for_same_user(self, listen: Address) -> bool:
        """Whether only processes of the server's own user on this machine are let in."""
        return is_loopback(listen.host) and not self.has_credential and not self.insecure


def is_loopback(host: str) -> bool:
    """Whether this name or address never leaves the machine. Names other than localhost are not looked up."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
