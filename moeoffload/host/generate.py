"""Answers prompts with an open model and streams the text; conversations compute only what is new in a turn."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from time import perf_counter
from typing import Any, Final, TextIO

import jinja2
import torch
from torch import nn
from transformers import DynamicCache, StoppingCriteria
from transformers.cache_utils import DynamicLayer
from transformers.generation.streamers import BaseStreamer

from moeoffload.errors import PromptError
from moeoffload.host.detokenizer import Detokenizer
from moeoffload.host.model import eos_tokens
from moeoffload.host.session import OffloadedModel
from moeoffload.host.speculative import VerifiedGeneration, new_drafter
from moeoffload.kernels.growing_cache import GrowingLayer
from moeoffload.text import for_terminal, one_line

logger = logging.getLogger(__name__)

_OTHER_CACHES: Final = ("mamba", "minimaxfor")
"""Parts of the class names of models with a cache class of their own; the later MiniMax-M2 uses the usual one."""

Message = dict[str, str]
"""``role`` (system, user or assistant) and ``content``."""


@dataclass(frozen=True)
class PreparedPrompt:
    """The model's inputs for a prompt: input_ids and attention_mask (1, n) int64, and how many tokens may follow."""

    inputs: dict[str, torch.Tensor]
    max_new_tokens: int


class Ending(Enum):
    """Why an answer ended: by an end token, at the token limit, or because it was asked to stop."""

    COMPLETE = auto()
    LIMIT = auto()
    STOPPED = auto()


@dataclass(frozen=True)
class Answer:
    """An answer: its text, its tokens (n,) int64, and the seconds to its first token and from there to the last."""

    text: str
    tokens: torch.Tensor
    ending: Ending
    first_token_s: float
    further_s: float

    @property
    def tokens_per_s(self) -> float:
        """The rate of all tokens after the first; 0 if there are none."""
        return (self.tokens.numel() - 1) / self.further_s if self.further_s else 0.0


class StoppedError(Exception):
    """An answer was stopped before its first token."""


@dataclass(frozen=True)
class Watch:
    """Callbacks by which `generate` reports progress and asks whether to stop; called from several threads.

    ``on_prompt`` gets the number of prompt tokens computed so far and their total; ``should_stop`` is called at every
    layer of the prompt and at every token of the answer; ``on_tokens`` gets the number of the answer's tokens so far.
    """

    on_prompt: Callable[[float, int], None] = lambda done, total: None
    should_stop: Callable[[], bool] = lambda: False
    on_tokens: Callable[[int], None] = lambda n_tokens: None


class _Streamer(BaseStreamer):
    """Writes the text of the completion, and nothing else, to ``stream``, as soon as it is certain."""

    def __init__(self, tokenizer: Any, stream: TextIO, on_tokens: Callable[[int], None]) -> None:
        self._on_tokens = on_tokens
        self._n_tokens = 0
        self._detokenizer = Detokenizer(tokenizer)
        self._stream = stream
        self._is_prompt = True
        self.on_first: Callable[[], None] | None = None
        self.text = ""
        self.first_at = self.last_at = 0.0

    def put(self, value: torch.Tensor) -> None:
        """See `BaseStreamer`: gets the prompt (1, n) first, then tokens of the answer (n,), on the CPU."""
        if self._is_prompt:
            self._is_prompt = False
            return
        self.last_at = perf_counter()
        if not self.first_at:
            self.first_at = self.last_at
            if self.on_first is not None:
                self.on_first()
        for token in value.reshape(-1).tolist():
            self._write(self._detokenizer.push(token))
        self._n_tokens += value.numel()
        self._on_tokens(self._n_tokens)

    def end(self) -> None:
        """See `BaseStreamer`: called when the answer is complete."""
        self._write(self._detokenizer.finish(), "\n")

    def _write(self, text: str, end: str = "") -> None:
        self.text += text
        if text or end:
            self._stream.write((for_terminal(text) if self._stream.isatty() else text) + end)
            self._stream.flush()


class _Stop(StoppingCriteria):
    """Ends an answer when it is asked to."""

    def __init__(self, should_stop: Callable[[], bool]) -> None:
        self._should_stop = should_stop
        self.stopped = False

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> Any:
        """See `StoppingCriteria`: (batch,) bool."""
        self.stopped = self._should_stop()
        return torch.full((input_ids.shape[0],), self.stopped, device=input_ids.device)


def prepare_prompt(offloaded: OffloadedModel, prompt: str, *, chat: bool) -> PreparedPrompt:
    """Tokenizes ``prompt``; with ``chat`` it applies the tokenizer's chat template, if there is one.
    Raises PromptError: it has no tokens, or leaves no room for an answer in the model's context."""
    if chat and offloaded.tokenizer.chat_template:
        return prepare_chat(offloaded, [{"role": "user", "content": prompt}])
    return _prepared(offloaded, prompt, special=True)


def prepare_chat(offloaded: OffloadedModel, messages: Sequence[Message]) -> PreparedPrompt:
    """Tokenizes a conversation up to where the answer begins. Without a chat template the messages are joined as plain
    text, with a line break after each answer and after the system message.
    Raises PromptError: as `prepare_prompt`, or the template rejects these messages."""
    tokenizer = offloaded.tokenizer
    if not tokenizer.chat_template:
        text = "".join(each["content"] + ("" if each["role"] == "user" else "\n") for each in messages)
        return _prepared(offloaded, text, special=True)
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except jinja2.TemplateError as error:
        raise PromptError(f"the model's chat template does not take this: {one_line(str(error))}") from None
    return _prepared(offloaded, text, special=False)


def _prepared(offloaded: OffloadedModel, text: str, *, special: bool) -> PreparedPrompt:
    encoded = offloaded.tokenizer(text, return_tensors="pt", add_special_tokens=special, verbose=False)
    n_tokens = encoded["input_ids"].shape[1]
    if n_tokens == 0:
        raise PromptError("the prompt has no tokens")
    most = getattr(offloaded.checkpoint.config.get_text_config(), "max_position_embeddings", None)
    room = offloaded.settings.max_new_tokens
    if most is not None:
        if n_tokens >= most:
            raise PromptError(f"the prompt has {n_tokens} tokens, the model's context holds {most}")
        if n_tokens + room > most:
            logger.warning("the context of %d tokens leaves room for %d new ones", most, most - n_tokens)
            room = most - n_tokens
    inputs = {name: encoded[name].to(offloaded.model.device) for name in ("input_ids", "attention_mask")}
    return PreparedPrompt(inputs, room)


def generate(
    offloaded: OffloadedModel,
    prompt: PreparedPrompt,
    stream: TextIO,
    *,
    cache: DynamicCache | None = None,
    watch: Watch | None = None,
) -> Answer:
    """Writes the completion of ``prompt`` to ``stream`` as it is generated.

    ``cache`` holds the keys and values of a prefix of the prompt, which is not computed again; the rest is added to it.
    Raises ServerError: a server failed; the text written so far stays; StoppedError: stopped before the first token.
    """
    settings, tokenizer, watch = offloaded.settings, offloaded.tokenizer, watch or Watch()
    stop = _Stop(watch.should_stop)
    options: dict[str, Any] = {
        "do_sample": settings.temperature > 0,
        "max_new_tokens": prompt.max_new_tokens,
        "stopping_criteria": [stop],
    }
    if settings.temperature > 0:
        options["temperature"] = settings.temperature
        if settings.seed is not None:
            torch.manual_seed(settings.seed)
    if tokenizer.pad_token_id is None and tokenizer.eos_token_id is not None:
        options["pad_token_id"] = tokenizer.eos_token_id
    if cache is not None:
        options["past_key_values"] = cache
    streamer = _Streamer(tokenizer, stream, watch.on_tokens)
    n_prompt = prompt.inputs["input_ids"].shape[1]
    n_new = n_prompt - (cache.get_seq_length() if cache is not None else 0)
    if (drafter := new_drafter(settings, offloaded.draft)) is not None:
        guess_length, recorder = offloaded.guess_length, offloaded.recorder
        options["custom_generate"] = VerifiedGeneration(drafter, guess_length, streamer, recorder)
    started = perf_counter()
    with _watched(offloaded, n_new, watch) as streamer.on_first:
        tokens = offloaded.model.generate(**prompt.inputs, **options, streamer=streamer)
    completion: torch.Tensor = tokens[0, n_prompt:]
    if int(completion[-1]) in eos_tokens(offloaded.model):
        ending = Ending.COMPLETE
    else:
        ending = Ending.STOPPED if stop.stopped else Ending.LIMIT
    times = streamer.first_at - started, streamer.last_at - streamer.first_at
    return Answer(streamer.text, completion, ending, *times)


@contextlib.contextmanager
def _watched(offloaded: OffloadedModel, n_tokens: int, watch: Watch) -> Iterator[Callable[[], None]]:
    """Reports the progress of a prompt of ``n_tokens`` to ``watch``; yields a function that ends this, to be called at
    the first token, so that decode steps pay nothing."""
    layers = offloaded.checkpoint.layers
    done, lock = 0, threading.Lock()

    def on_layer(module: nn.Module, args: tuple[torch.Tensor, ...], named: dict[str, torch.Tensor]) -> None:
        nonlocal done
        if watch.should_stop():
            raise StoppedError
        with lock:
            watch.on_prompt(done / len(layers), n_tokens)
            done += next(iter((*args, *named.values()))).shape[0]

    with contextlib.ExitStack() as hooks:
        for layer in layers:
            module = offloaded.model.get_submodule(layer.module_name)
            hooks.callback(module.register_forward_pre_hook(on_layer, with_kwargs=True).remove)

        def on_first_token() -> None:
            hooks.close()
            watch.on_prompt(n_tokens, n_tokens)

        yield on_first_token


class Conversation:
    """The turns so far with an open model, and their KV cache, so that a turn computes only new tokens. ``system`` is
    the system message that precedes the first turn."""

    def __init__(self, offloaded: OffloadedModel, system: str = "") -> None:
        self._offloaded = offloaded
        self.system = system
        self.turns: list[Message] = []
        self._cache: DynamicCache | None = None
        self._cached = torch.empty(0, dtype=torch.int64)  # (n,) the tokens in the cache

    def clear(self) -> None:
        """Forgets all turns; the system message stays."""
        self.turns, self._cache = [], None

    def ask(self, text: str, stream: TextIO, watch: Watch | None = None) -> Answer:
        """Runs one turn: writes the answer to ``text`` to ``stream`` as it is generated. A stopped answer is kept.

        Any error forgets this turn. Raises PromptError: no answer fits in the model's context, or the chat template
        rejects these messages; ServerError: a server failed; StoppedError: it was stopped before its first token.
        """
        asked = [*self.turns, {"role": "user", "content": text}]
        first = [{"role": "system", "content": self.system}] if self.system else []
        prompt = prepare_chat(self._offloaded, [*first, *asked])
        ids = prompt.inputs["input_ids"][0]
        n_kept = self._keep(ids)
        try:
            answer = generate(self._offloaded, prompt, stream, cache=self._cache, watch=watch)
        except BaseException:
            if self._cache is not None and not _rewind(self._cache, n_kept):
                self._cache = None
            raise
        self.turns = [*asked, {"role": "assistant", "content": answer.text}]
        if self._cache is not None:
            self._cached = torch.cat([ids, answer.tokens])[: self._cache.get_seq_length()]
        return answer

    def _keep(self, ids: torch.Tensor) -> int:
        """Keeps the longest cached prefix of ``ids`` (n,) that leaves a token to compute; returns its length.

        A cache of the model's own class is not kept; one that discards tokens (sliding windows, states of linear
        attention) is kept whole or not at all.
        """
        if self._cache is not None:
            shared = min(self._cached.numel(), ids.numel() - 1)
            differs = (self._cached[:shared] != ids[:shared]).nonzero()
            n_kept = int(differs[0]) if differs.numel() else shared
            if n_kept == self._cached.numel() or _rewind(self._cache, n_kept):
                self._cached = ids[:n_kept]
                return n_kept
        self._cache = _new_cache(self._offloaded.model)
        self._cached = ids[:0]
        return 0


def _new_cache(model: Any) -> DynamicCache | None:
    """Returns an empty cache if ``model.generate`` would make a `DynamicCache`, else None."""
    wanted = model.generation_config
    if (
        any(name in type(model).__name__.lower() for name in _OTHER_CACHES)
        or wanted.use_cache is False
        or wanted.cache_implementation not in (None, "dynamic")
    ):
        return None
    return DynamicCache(config=model.config.get_text_config(decoder=True))


def _rewind(cache: DynamicCache, n_tokens: int) -> bool:
    """Crops the cache to its first ``n_tokens`` tokens; after a failed pass layers may differ in length.

    Returns False, and leaves the cache as it is, if any layer is not full attention: such a cache cannot be rewound.
    """
    if not all(type(layer) in (DynamicLayer, GrowingLayer) for layer in cache.layers):
        return False
    for layer in cache.layers:
        layer.crop(min(0, n_tokens - layer.get_seq_length()))
    return True
