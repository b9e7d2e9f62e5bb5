"""Small text tasks with checkable answers, for training and testing the demo checkpoint.

Standard library only. A prompt is one line of plain text ending in ``=``; the model continues it with a space, the
answer and the end-of-sequence token::

    add 12 30 =        ->  " 42"
    reverse hello =    ->  " olleh"
    sort hello =       ->  " ehllo"
    count l hello =    ->  " 2"

A prompt belongs to the held-out split when a hash of its text says so, so the split is the same everywhere and no
list of prompts has to be kept.

In a chat with tools, a prompt whose first word is a tool's name is answered by a call of the tool with the other words
as its arguments, and the tool's result by that result::

    price pear =       ->  '<tool_call>\\n{"name": "price", "arguments": {"item": "pear"}}\\n</tool_call>', then " 7"
"""

import hashlib
import json
import random
import string
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

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

_ARITY = {Task.ADD: 2, Task.REVERSE: 1, Task.SORT: 1, Task.COUNT: 2}
_PARAMETERS = (
    "a", "b", "city", "date", "id", "item", "key", "letter", "n", "name", "path", "query", "text", "word", "x",
)  # fmt: skip


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


# --- chats with tools ---


@dataclass(frozen=True)
class Tool:
    """A function with parameters without types, as the demo's chat template shows it to the model."""

    name: str
    parameters: tuple[str, ...]

    def schema(self) -> dict[str, Any]:
        """The tool in the form of the chat API."""
        properties: dict[str, Any] = {name: {} for name in self.parameters}
        parameters = {"type": "object", "properties": properties, "required": list(self.parameters)}
        return {"type": "function", "function": {"name": self.name, "parameters": parameters}}

    def arguments(self, prompt: str) -> dict[str, Any]:
        """The arguments of the call that answers `prompt`: numbers are numbers, other words strings."""
        words = prompt.removesuffix(" =").split()[1:]
        return {p: int(w) if w.isdigit() else w for p, w in zip(self.parameters, words, strict=True)}


@dataclass(frozen=True)
class Turn:
    """A prompt and its answer; with the tool that it calls and the tool's result, or neither."""

    prompt: str
    answer: str
    tool: Tool | None = None
    result: str = ""


def tools_text(tools: list[Tool]) -> str:
    """What the chat template shows of the tools."""
    return "<tools>\n" + "".join(" ".join((tool.name, *tool.parameters)) + "\n" for tool in tools) + "</tools>\n"


def call_text(tool: Tool, prompt: str) -> str:
    """The call that answers the prompt, as the model writes it."""
    call = {"name": tool.name, "arguments": tool.arguments(prompt)}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


def result_text(result: str) -> str:
    """What the chat template shows of a tool's result."""
    return f"<tool_response>{result}</tool_response>"


def chat_steps(turn: Turn) -> list[tuple[str, str]]:
    """What the model is given in a turn, and what it should write after it: one step, or two with a call."""
    if turn.tool is None:
        return [(turn.prompt, turn.answer)]
    return [(turn.prompt, call_text(turn.tool, turn.prompt)), (result_text(turn.result), turn.answer)]


def _name(rng: random.Random) -> str:
    return "".join(rng.choices(string.ascii_lowercase + "_", k=rng.randint(2, 9))).strip("_") or "f"


def _argument(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.35:
        return str(rng.randrange(10 ** rng.randint(1, 4)))
    word = "".join(rng.choices(string.ascii_lowercase, k=rng.randint(1, 9)))
    return word.capitalize() if kind > 0.9 else word


def _tool(rng: random.Random) -> Tool:
    name: str = rng.choice(TASKS) if rng.random() < 0.3 else _name(rng)
    n = _ARITY[Task(name)] if name in _ARITY else rng.choice((1, 1, 2, 2, 3))
    known = rng.sample(_PARAMETERS, n)
    return Tool(str(name), tuple(dict.fromkeys(each if rng.random() < 0.8 else _name(rng) for each in known)))


def conversation(split: Split, rng: random.Random, max_turns: int = 10) -> tuple[list[Tool], list[Turn]]:
    """Some tools, and turns of which about two in three call one; prompts of the others name a task that is none."""
    tools = list({tool.name: tool for tool in (_tool(rng) for _ in range(rng.randint(1, 4)))}.values())
    others = [task for task in TASKS if task not in {tool.name for tool in tools}]
    turns: list[Turn] = []
    for _ in range(rng.randint(1, max_turns)):
        if others and rng.random() < 0.35:
            turns.append(Turn(*sample(split, rng, rng.choice(others))))
            continue
        tool = rng.choice(tools)
        while split_of(prompt := " ".join((tool.name, *(_argument(rng) for _ in tool.parameters), "="))) != split:
            pass
        result = _argument(rng)
        turns.append(Turn(prompt, f" {result}", tool, result))
    return tools, turns
