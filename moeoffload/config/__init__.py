"""Every setting, defined once: one model per program, read by pydantic-settings and validated on entry."""

from moeoffload.config.base import SettingInfo, SettingsBase, warn_of_misspelt_names
from moeoffload.config.host import DenseFormat, HostSettings, Mode, Pipeline, ServeSettings
from moeoffload.config.server import ExpertServerSettings, Kernel
from moeoffload.config.values import OWN_HEAD, Address, bracketed, is_loopback

__all__ = [
    "OWN_HEAD",
    "Address",
    "DenseFormat",
    "ExpertServerSettings",
    "HostSettings",
    "Kernel",
    "Mode",
    "Pipeline",
    "ServeSettings",
    "SettingInfo",
    "SettingsBase",
    "bracketed",
    "is_loopback",
    "warn_of_misspelt_names",
]
