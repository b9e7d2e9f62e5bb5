"""The settings of what a host does when an expert server is slow, lost or wrong."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from moeoffload.config.sources import Panel, Setting, SettingsBase

_ALIAS = "DFLASH_MOE_EXPERT_COMPUTE_IPC_"


class RecoverySettings(SettingsBase):
    """What `moeoffload.config.settings.HostSettings` says of faults."""

    required: Annotated[
        bool | None,
        Field(
            description="Expert servers are needed: one that is lost and has no replica ends the run. If not required, "
            "a server on this machine takes the place of one that cannot be reached at the start."
        ),
        Setting(
            alias=_ALIAS + "REQUIRED",
            default_means="needed at the start; the host computes the experts of one that is lost later",
            panel=Panel.RECOVERY,
        ),
    ] = None
    replicas: Annotated[
        int,
        Field(ge=1, le=8, description="Expert servers that hold each expert; one of them computes it."),
        Setting(unit="copies", panel=Panel.RECOVERY),
    ] = 1
    fallback_gib: Annotated[
        float,
        Field(
            ge=0,
            le=65536,
            description="The most memory for experts of lost servers, which the host reads and computes itself.",
        ),
        Setting(unit="GiB", panel=Panel.RECOVERY),
    ] = 4.0
    hedge_ms: Annotated[
        float,
        Field(ge=0, le=60000, description="A reply later than this makes a replica compute the same; the first wins."),
        Setting(unit="milliseconds", default_means="never", panel=Panel.RECOVERY),
    ] = 0.0
    verify_percent: Annotated[
        float,
        Field(
            ge=0,
            le=100,
            description="The share of dispatches that a replica or the host computes again; a difference ends the run.",
        ),
        Setting(unit="percent", default_means="none", panel=Panel.RECOVERY),
    ] = 0.0
    connect_timeout_s: Annotated[
        float,
        Field(gt=0, le=3600, description="The longest wait for an expert server to answer at the start."),
        Setting(unit="seconds", panel=Panel.TIME_LIMITS),
    ] = 10.0
    load_timeout_s: Annotated[
        float,
        Field(gt=0, le=86400, description="The longest wait for an expert server to load its experts."),
        Setting(unit="seconds", panel=Panel.TIME_LIMITS),
    ] = 1800.0
    dispatch_timeout_s: Annotated[
        float,
        Field(gt=0, le=3600, description="The longest wait for the reply to one dispatch, whatever its size."),
        Setting(unit="seconds", panel=Panel.TIME_LIMITS),
    ] = 60.0
    dispatch_floor_s: Annotated[
        float,
        Field(
            gt=0,
            le=3600,
            description="The deadline of a dispatch is learned from recent ones, but not below this.",
        ),
        Setting(unit="seconds", panel=Panel.TIME_LIMITS),
    ] = 2.0
