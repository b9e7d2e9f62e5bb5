"""Small text tasks with checkable answers, for training and testing the demo checkpoint.

Standard library only. A prompt is one line of plain text ending in ``=``; the model continues it with a space, the
answer and the end-of-sequence token::

    add 12 30 =        ->  " 42"
    reverse hello =    ->  " olleh"
    sort hello =       ->  " ehllo"
    count l hello =    ->  " 2"

A prompt belongs to the held-out split when a hash of its text says so, so the split is the same everywhere and no
list of prompts has to be kept.
"""

import hashlib
import random
import string
from enum import StrEnum
from typing import Literal

Split = Literal["train", "held-out"]

HELD_OUT_PERCENT = 10
MAX_DIGITS = 3  # per number in `add`
# Of numbers of 1, 2 and 3 digits. Short ones are few, and training on them often would be learning by heart.
DIGITS_WEIGHTS = (1, 3, 6)
MIN_LETTERS, MAX_LETTERS = 3, 7  # per word in the three word tasks


class Task(StrEnum):
    """The task's name, which is also the first word of its prompts."""

    ADD = "add"
    REVERSE = "reverse"
    SORT = "sort"
    COUNT = "count"


TASKS: tuple[Task, ...] = tuple(Task)


def split_of(prompt: str) -> Split:
    """Which split the prompt belongs to; depends on its text alone."""
    digest = hashlib.sha256(prompt.encode()).digest()
    return "held-out" if int.from_bytes(digest[:4], "big") % 100 < HELD_OUT_PERCENT else "train"


def answer(prompt: str) -> str:
    """The right continuation of a prompt, with its leading space and without the end token."""
    name, *args = prompt.removesuffix(" =").split()
    match Task(name):
        case Task.ADD:
            return f" {int(args[0]) + int(args[1])}"
        case Task.REVERSE:
            return f" {args[0][::-1]}"
        case Task.SORT:
            return f" {''.join(sorted(args[0]))}"
        case Task.COUNT:
            return f" {args[1].count(args[0])}"


def check(prompt: str, completion: str) -> bool:
    """Whether the completion (end token already removed) is exactly the right answer."""
    return completion == answer(prompt)


def _word(rng: random.Random, alphabet: str = string.ascii_lowercase) -> str:
    return "".join(rng.choices(alphabet, k=rng.randint(MIN_LETTERS, MAX_LETTERS)))


def _number(rng: random.Random) -> int:
    """A number that is short more often than a uniform one: see `DIGITS_WEIGHTS`."""
    (digits,) = rng.choices(range(1, MAX_DIGITS + 1), DIGITS_WEIGHTS)
    return rng.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits)


def _prompt(task: Task, rng: random.Random) -> str:
    match task:
        case Task.ADD:
            return f"add {_number(rng)} {_number(rng)} ="
        case Task.REVERSE | Task.SORT:
            return f"{task} {_word(rng)} ="
        case Task.COUNT:
            # Few different letters per word, or nearly every count would be 0 or 1.
            letters = "".join(rng.sample(string.ascii_lowercase, rng.randint(2, 4)))
            return f"count {rng.choice(letters)} {_word(rng, letters)} ="


def sample(split: Split, rng: random.Random, task: Task | None = None) -> tuple[str, str]:
    """One (prompt, answer) of the split; of a random task unless one is named."""
    task = task or rng.choice(TASKS)
    while split_of(prompt := _prompt(task, rng)) != split:
        pass
    return prompt, answer(prompt)


def prompts(n: int, seed: int, split: Split = "held-out", task: Task | None = None) -> list[str]:
    """`n` prompts of the split, the tasks taking turns (or all of one task); the same for the same arguments."""
    rng = random.Random(seed)
    return [sample(split, rng, task or TASKS[i % len(TASKS)])[0] for i in range(n)]


def long_prompt(n_chars: int, seed: int, split: Split = "held-out", task: Task | None = None) -> str:
    """A prompt of about `n_chars` characters (= tokens): solved training lines, then one open question of `split`.

    `answer` and `check` are for single lines: give them ``prompt.rsplit("\\n", 1)[-1]``.
    """
    rng = random.Random(seed)
    question, _ = sample(split, rng, task)
    lines: list[str] = []
    length = len(question)
    while True:
        line = "".join(sample("train", rng))
        length += len(line) + 1
        if length > n_chars:
            return "\n".join([*lines, question])
        lines.append(line)
