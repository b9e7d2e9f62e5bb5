"""What hosts generate under faults: fixed prompts of the demo model with answers that leave no doubt, greedily."""

from __future__ import annotations

from typing import Any

import tasks


def fixed_prompts() -> list[str]:
    """Short ones of all tasks, and one with solved lines before its question, whose prefill is a large call."""
    return [*tasks.prompts(8, seed=3), tasks.long_prompt(300, seed=3)]


def generate(offloaded: Any, prompt: str, **options: Any) -> list[int]:
    """The new tokens of one prompt, greedily; 16 unless ``options`` say otherwise."""
    inputs = offloaded.tokenizer(prompt, return_tensors="pt").to(offloaded.model.device)
    tokens = offloaded.model.generate(**inputs, do_sample=False, **{"max_new_tokens": 16, **options})
    found: list[int] = tokens[0, inputs["input_ids"].shape[1] :].tolist()
    return found
