"""Every setting, defined once: one model per program, read by pydantic-settings and validated on entry."""

from moeoffload.config.base import SettingsBase, warn_of_misspelt_names
from moeoffload.config.describe import SettingInfo
from moeoffload.config.host import DenseFormat, DtypeChoice, ExpertFormat, HostSettings, Mode, PayloadChoice, Pipeline
from moeoffload.config.serve import ServeSettings
from moeoffload.config.server import ExpertServerSettings, KeepWarm, Kernel
from moeoffload.config.shared import LogLevel, TransportChoice
from moeoffload.config.values import OWN_HEAD, Address, bracketed, is_loopback

__all__ = [
    "OWN_HEAD",
    "Address",
    "DenseFormat",
    "DtypeChoice",
    "ExpertFormat",
    "ExpertServerSettings",
    "HostSettings",
    "KeepWarm",
    "Kernel",
    "LogLevel",
    "Mode",
    "PayloadChoice",
    "Pipeline",
    "ServeSettings",
    "SettingInfo",
    "SettingsBase",
    "TransportChoice",
    "bracketed",
    "is_loopback",
    "warn_of_misspelt_names",
]
