"""The settings of how a host chooses tokens, and guesses them ahead."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from moeoffload.config.sources import Panel, Setting, SettingsBase
from moeoffload.config.values import check_folder_to_read


class GenerationSettings(SettingsBase):
    """What `moeoffload.config.settings.HostSettings` says of answers."""

    max_new_tokens: Annotated[
        int,
        Field(ge=1, description="The most tokens to generate."),
        Setting(unit="tokens", panel=Panel.GENERATION),
    ] = 256
    temperature: Annotated[
        float,
        Field(ge=0, le=5, description="Spread of the sampling."),
        Setting(default_means="greedy, always the likeliest token", panel=Panel.GENERATION),
    ] = 0.0
    seed: Annotated[
        int | None,
        Field(ge=-(2**63), le=2**63 - 1, description="Start of the random numbers that sampling draws."),
        Setting(allowed="an integer of 64 bits", default_means="a new one each run", panel=Panel.GENERATION),
    ] = None
    prompt_lookup: Annotated[
        int,
        Field(ge=0, le=15, description="Tokens guessed from what the text has repeated, and verified in one pass."),
        Setting(unit="tokens", default_means="no guesses", panel=Panel.GENERATION),
    ] = 0
    draft_model: Annotated[
        Path | None,
        AfterValidator(check_folder_to_read),
        Field(description="A small model of the same vocabulary that guesses tokens, which are verified in one pass."),
        Setting(
            allowed="the folder of a transformers checkpoint",
            default_means="no guesses",
            metavar="FOLDER",
            panel=Panel.GENERATION,
        ),
    ] = None
    draft_tokens: Annotated[
        int,
        Field(ge=1, le=15, description="Tokens that the draft model guesses each time."),
        Setting(unit="tokens", panel=Panel.GENERATION),
    ] = 4
