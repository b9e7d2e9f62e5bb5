"""What hosts generate under faults: fixed prompts of the demo model with answers that leave no doubt, greedily."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import tasks

from fault_kit.processes import ROOT

DEMO: Final = ROOT / "examples" / "demo" / "checkpoint"
N_SHORT: Final = 8
LONG_CHARACTERS: Final = 300
MAX_NEW_TOKENS: Final = 16


def fixed_prompts() -> list[str]:
    """Short ones of all tasks, and one with solved lines before its question, whose prefill is a large call."""
    return [*tasks.prompts(N_SHORT, seed=3), tasks.long_prompt(LONG_CHARACTERS, seed=3)]


def generate_all(offloaded: Any, prompts: Sequence[str]) -> list[list[int]]:
    """The new tokens of each prompt."""
    return [generate_one(offloaded, prompt, max_new_tokens=MAX_NEW_TOKENS) for prompt in prompts]


def generate_one(offloaded: Any, prompt: str, **options: Any) -> list[int]:
    """The new tokens of one prompt, greedily."""
    inputs = offloaded.tokenizer(prompt, return_tensors="pt")
    tokens = offloaded.model.generate(**inputs, do_sample=False, **options)
    found: list[int] = tokens[0, inputs["input_ids"].shape[1] :].tolist()
    return found
