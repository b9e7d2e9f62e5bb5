"""Request bodies: OpenAI's parameters that are supported, those that are ignored, and those that are refused."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from moeoffload.serve.api_errors import bad_request, unsupported
from moeoffload.serve.grammar import MAX_GRAMMAR_BYTES, Grammar
from moeoffload.serve.request import SamplingOptions

MAX_ALTERNATIVES: Final = 20  # tokens with log probabilities per position, as in OpenAI's API
MAX_CHOICES: Final = 16
MAX_STOPS: Final = 4
MAX_STOP_LENGTH: Final = 1000
MAX_BIASES: Final = 1024
MAX_TOOLS: Final = 128

IGNORED: Final = frozenset(
    (
        "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
        "prediction", "include",
    )
)  # fmt: skip
"""Parameters that do not change the answer."""
_NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    "modalities": (["text"],),
    "function_call": ("none",),
    "functions": ([],),
    "suffix": ("",),
    "min_tokens": (0,),
    "stop_token_ids": ([],),
    "use_beam_search": (False,),
    "audio": (),
    "verbosity": ("medium",),
    "web_search_options": (),
    "best_of": (),
    "truncation": ("disabled",),
    "background": (False,),
}
"""Known but unsupported parameters, with values that have no effect and are therefore accepted."""
_SAMPLING: Final = {
    *("temperature", "top_p", "top_k", "min_p"),
    *("repetition_penalty", "frequency_penalty", "presence_penalty"),
}
"""Parameters of which a model may recommend values."""


def read_content(value: Any, *, kinds: Sequence[str] = ("text",)) -> str:
    """Joins text, or parts of these ``kinds``, to one string. Raises ValueError: it is something else."""
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        raise ValueError("expected a string or an array of content parts")
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in kinds or not isinstance(part.get("text"), str):
            raise ValueError(f"content parts of type {str(kind)[:50]!r} are not supported, only text")
        texts.append(part["text"])
    return "".join(texts)


def _read_prompt(value: Any) -> Any:
    """Converts one or several prompts, each text or tokens, to a list."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if _are_tokens(value):
            return [value]
        if all(isinstance(prompt, str) for prompt in value) or all(_are_tokens(prompt) for prompt in value):
            return value
    raise ValueError("expected a string, an array of strings, an array of tokens, or an array of token arrays")


def _are_tokens(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
Stops = Annotated[
    list[Stop],
    Field(max_length=MAX_STOPS),
    BeforeValidator(lambda value: [value] if isinstance(value, str) else [] if value is None else value),
]
Biases = Annotated[
    dict[Annotated[str, Field(pattern="^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]],
    Field(max_length=MAX_BIASES),
    BeforeValidator(lambda value: {} if value is None else value),
]


class StrictModel(BaseModel):
    """Base of everything that clients send: no conversions; fields that are not known are kept."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    def check_unknown(self) -> None:
        """Refuses fields that are not known, except for values that have no effect.
        Raises ApiError, which names the parameter."""
        for name, value in (self.model_extra or {}).items():
            if value is None or name in IGNORED:
                continue
            if name not in _NEUTRAL:
                raise bad_request(f"Unknown parameter: '{name}'.", name[:100], "unknown_parameter")
            if value not in _NEUTRAL[name]:
                raise unsupported(name)


class StreamOptions(StrictModel):
    """Options of a stream."""

    include_usage: bool | None = False


class _Closed(StrictModel):
    model_config = ConfigDict(extra="forbid")


class JsonSchema(_Closed):
    """A schema of OpenAI's ``response_format``; it is always enforced strictly."""

    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(_Closed):
    """OpenAI's structured outputs."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


Regex = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_BYTES)]
Alternatives = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=1000)]], Field(min_length=1, max_length=1000)
]


class StructuredOutputs(_Closed):
    """vLLM's structured outputs."""

    json_: Annotated[dict[str, Any] | None, Field(alias="json")] = None
    regex: Regex | None = None
    choice: Alternatives | None = None


class GenerationRequest(StrictModel):
    """Parameters that chats and completions share."""

    model: str
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Stops = Field(default_factory=list)
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = 1
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: Biases = Field(default_factory=dict)
    ignore_eos: bool | None = False
    skip_special_tokens: bool | None = True
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | None = None
    guided_regex: Regex | None = None
    guided_choice: Alternatives | None = None

    def grammar(self) -> Grammar | None:
        """The grammar of the answer; None for any text. Raises ApiError: several were given."""
        asked = list(self._grammars())
        if len(asked) > 1:
            raise bad_request(f"'{asked[0].param}' and '{asked[1].param}' cannot go together.", asked[1].param)
        if asked and self.ignore_eos:
            raise bad_request("'ignore_eos' and a form of the answer cannot go together.", "ignore_eos")
        return asked[0] if asked else None

    def _grammars(self) -> Iterator[Grammar]:
        outputs = self.structured_outputs or StructuredOutputs()
        for prefix, schema, regex, choice in (
            ("guided_", self.guided_json, self.guided_regex, self.guided_choice),
            ("structured_outputs.", outputs.json_, outputs.regex, outputs.choice),
        ):
            if schema is not None:
                yield Grammar.of("json", schema, f"{prefix}json")
            if regex is not None:
                yield Grammar("regex", regex, f"{prefix}regex")
            if choice is not None:
                texts = (re.sub(r"([^\w\s])", r"\\\1", text, flags=re.ASCII) for text in choice)
                yield Grammar("regex", "|".join(texts), f"{prefix}choice")
        form = self.response_format
        if form is None or form.type == "text":
            return
        if form.type == "json_object":
            yield Grammar.of("json", {"type": "object"}, "response_format")
        elif form.json_schema is not None:
            yield Grammar.of("json", form.json_schema.schema_, "response_format.json_schema.schema")
        else:
            message = "'response_format' of type json_schema needs 'json_schema'."
            raise bad_request(message, "response_format.json_schema")

    @property
    def scores_prompt(self) -> bool:
        """Whether log probabilities of the prompt are requested."""
        return False

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with token counts."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def check(self, n_vocabulary: int) -> None:
        """Refuses parameters that would change the answer but are not supported.
        Raises ApiError, which names the parameter."""
        self.check_unknown()
        if self.stream_options is not None and not self.stream:
            raise bad_request("'stream_options' is allowed with 'stream' only.", "stream_options")
        if any(int(token) >= n_vocabulary for token in self.logit_bias):
            raise bad_request(f"Invalid 'logit_bias': tokens are 0 to {n_vocabulary - 1}.", "logit_bias")

    def options(
        self, index: int, max_tokens: int, alternatives: int | None, matcher: Any, defaults: Mapping[str, float]
    ) -> SamplingOptions:
        """The sampling options of choice ``index``; each choice has its own seed, the first one has the request's.
        ``matcher`` is that of `grammar`, ``defaults`` are the model's recommended values."""
        told: dict[str, Any] = {**defaults, **self.model_dump(include=_SAMPLING, exclude_none=True)}
        if told.get("top_p") == 0:
            told |= {"temperature": 0.0, "top_p": 1.0}
        told["top_k"] = max(0, int(told.get("top_k", 0)))
        return SamplingOptions(
            max_tokens=max_tokens,
            seed=None if self.seed is None else (self.seed + index) % 2**63,
            alternatives=alternatives,
            with_prompt=self.scores_prompt,
            bias={int(token): bias for token, bias in self.logit_bias.items()},
            ignore_eos=bool(self.ignore_eos),
            matcher=matcher,
            **told,
        )


class Function(StrictModel):
    """A tool's name, description, and the JSON schema of its arguments."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class FunctionTool(StrictModel):
    """A tool in OpenAI's form."""

    type: Literal["function"]
    function: Function


class Message(StrictModel):
    """One message of a chat. Further fields are passed to the chat template unchanged."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[str, BeforeValidator(read_content)] = ""
    tool_calls: list[dict[str, Any]] | None = None


class ChatRequest(GenerationRequest):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_ALTERNATIVES)] | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, str | bool | int | float] | None = None
    continue_final_message: bool | None = None

    @property
    def alternatives(self) -> int | None:
        """How many alternatives are listed for each token; None for no log probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def forced_functions(self) -> list[Function]:
        """The functions of which one must be called; empty if the model may choose.
        Raises ApiError: invalid ``tool_choice``."""
        functions, choice = [tool.function for tool in self.tools or ()], self.tool_choice
        if choice in (None, "auto", "none"):
            return []
        if choice == "required":
            if not functions:
                raise bad_request("'tool_choice' required needs 'tools'.", "tool_choice")
            return functions
        if not isinstance(choice, dict) or choice.get("type") != "function":
            raise unsupported("tool_choice", "only 'auto', 'none', 'required' and a function are")
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        named = [each for each in functions if each.name == name]
        if not named:
            raise bad_request("'tool_choice' names none of the 'tools'.", "tool_choice")
        return named[:1]

    def check(self, n_vocabulary: int) -> None:
        """See `GenerationRequest.check`."""
        super().check(n_vocabulary)
        if self.top_logprobs is not None and not self.logprobs:
            raise bad_request("'top_logprobs' is allowed with 'logprobs' only.", "top_logprobs")
        if self.ignore_eos and self.forced_functions():  # their grammar allows nothing but ends after the end
            raise bad_request("'ignore_eos' and a forced call cannot go together.", "ignore_eos")
        if self.tools and self.tool_choice != "none" and self.grammar() is not None:
            raise bad_request("'tools' and a form of the answer cannot go together; 'tool_choice' none can.", "tools")


class CompletionRequest(GenerationRequest):
    """The body of /v1/completions."""

    prompt: Annotated[list[str | list[int]], BeforeValidator(_read_prompt)]
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_ALTERNATIVES)] | None = None
    echo: bool | None = False
    best_of: int | None = None

    @property
    def scores_prompt(self) -> bool:
        """See `GenerationRequest`."""
        return bool(self.echo) and self.logprobs is not None

    def check(self, n_vocabulary: int) -> None:
        """See `GenerationRequest.check`."""
        super().check(n_vocabulary)
        if self.best_of not in (None, self.n or 1):
            raise unsupported("best_of", "only the value of 'n' is")
        for prompt in self.prompt:
            if isinstance(prompt, list) and not all(0 <= token < n_vocabulary for token in prompt):
                raise bad_request(f"Invalid 'prompt': tokens are 0 to {n_vocabulary - 1}.", "prompt")
