"""Speculative decoding: drafters guess the next tokens of a sequence, the model verifies the guesses in one pass.

Each sequence has its own drafter, which keeps track of the tokens it has seen. Guesses decide how fast an answer comes,
never what it says, so a drafter need not be exact or batch-invariant.
"""

from __future__ import annotations

import contextlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import Any, ClassVar, Final

import torch
from transformers import DynamicCache
from transformers.generation import PromptLookupCandidateGenerator
from transformers.modeling_layers import MtpModel

from moeoffload.config import HostSettings
from moeoffload.host.recorder import DECODE, PREFILL, Recorder
from moeoffload.host.rollback import keep_past, new_cache, roll_back

_MEMORY: Final = 0.95  # weight that a pass keeps with each further pass
_TRY: Final = 6  # passes of one trial
_OLD: Final = 0.2  # weight that earlier passes of a number keep when its trial begins
_AGAIN: Final = 100  # passes between two trials; doubled after a trial that changed nothing, up to _MOST
_MOST: Final = 1600


class Drafter(ABC):
    """Guesses tokens of one sequence. Not thread-safe."""

    wants_hidden: ClassVar[bool] = False
    """Whether `take` is to be called after every pass."""

    @abstractmethod
    def guess(self, tokens: Sequence[int], most: int) -> list[int]:
        """Returns up to ``most`` >= 1 tokens that may follow ``tokens``, a sequence that grows from call to call."""

    def take(self, first: int, hidden: torch.Tensor) -> None:  # noqa: B027
        """Takes the model's final hidden states (n, hidden) of the tokens from position ``first`` on, wrong guesses
        included."""


class PromptLookup(Drafter):
    """Guesses the tokens that followed an earlier occurrence of the last tokens."""

    def __init__(self, most: int) -> None:
        self._generator = PromptLookupCandidateGenerator(
            num_output_tokens=most, max_matching_ngram_size=2, max_length=1 << 30
        )

    def guess(self, tokens: Sequence[int], most: int) -> list[int]:
        """See `Drafter`."""
        known = torch.tensor([tokens])
        candidates, _ = self._generator.get_candidates(known)
        guesses: list[int] = candidates[0, known.shape[1] :].tolist()
        return guesses[:most]


class DraftModel(Drafter):
    """Guesses the greedy output of a small model with the same vocabulary."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._cache = new_cache(model)
        keep_past(self._cache)
        self._cached: list[int] = []
        self._n_sure = 0  # how many of them were not guesses

    @torch.inference_mode()
    def guess(self, tokens: Sequence[int], most: int) -> list[int]:
        """See `Drafter`."""
        cached, n_same = self._cached, self._n_sure
        while n_same < min(len(cached), len(tokens) - 1) and cached[n_same] == tokens[n_same]:
            n_same += 1
        roll_back(self._cache, len(cached) - n_same)
        keep_past(self._cache)
        self._n_sure, new = len(tokens), list(tokens[n_same:])
        guesses: list[int] = []
        self._cached = list(tokens[:n_same])
        while len(guesses) < most:
            positions = torch.arange(len(self._cached), len(self._cached) + len(new), device=self._model.device)
            logits = self._model(
                input_ids=torch.tensor([new], device=self._model.device),
                position_ids=positions[None],
                past_key_values=self._cache,
                use_cache=True,
            ).logits
            self._cached += new
            new = [int(logits[0, -1].argmax())]
            guesses += new
        return guesses


class DraftHead(Drafter):
    """Guesses with the model's own multi-token-prediction (MTP) layer.

    From the model's hidden state of a token and the token chosen after it, the layer predicts the one after that; it
    predicts further tokens from its own hidden states.
    """

    wants_hidden = True

    def __init__(self, head: Any) -> None:
        """``head``: see `load_draft_head`."""
        self._head = head
        self._cache = self._new_cache()
        self._rows: list[torch.Tensor] = []  # hidden states of tokens that the head has not seen
        self._first = self._end = 0  # positions of the first of these tokens, and after the last

    def _new_cache(self) -> DynamicCache:
        return DynamicCache(config=self._head.config)

    def take(self, first: int, hidden: torch.Tensor) -> None:
        """See `Drafter`."""
        if first > self._end:  # a gap: a cached prefix of another request, or steps with many requests
            self._cache = self._new_cache()
            self._rows, self._first, self._end = [], first, first
        self._cut(first)
        self._rows.append(hidden[max(0, self._end - first) :])
        self._end = max(self._end, first + len(hidden))

    def _cut(self, end: int) -> None:
        """Drops the hidden states from position ``end`` on."""
        while self._end > max(end, self._first):
            rows = self._rows.pop()
            self._end -= len(rows)
            if (kept := end - self._end) > 0:
                self._rows.append(rows[:kept])
                self._end = end

    @torch.inference_mode()
    def guess(self, tokens: Sequence[int], most: int) -> list[int]:
        """See `Drafter`."""
        self._cut(len(tokens) - 1)
        if self._first == self._end or self._end != len(tokens) - 1:
            return []
        rows, new, at = torch.cat(self._rows)[None], list(tokens[self._first + 1 :]), self._first + 1
        self._rows, self._first = [], self._end
        guesses: list[int] = []
        keep_past(self._cache)
        while True:
            rows = self._head.forward_layer(
                0,
                rows,
                torch.arange(at, at + len(new), device=rows.device)[None],
                self._cache,
                input_ids=torch.tensor([new], device=rows.device),
            )[:, -1:]
            at += len(new)
            new = [int(self._head.shared_head(rows)[0, -1].argmax())]
            guesses += new
            if len(guesses) == most:
                roll_back(self._cache, most - 1)
                return guesses


def new_drafter(settings: HostSettings, draft: Any) -> Drafter | None:
    """Returns the drafter of a new sequence, None for no guesses; ``draft`` is `OffloadedModel.draft`."""
    if draft is not None:
        return DraftHead(draft) if isinstance(draft, MtpModel) else DraftModel(draft)
    return PromptLookup(settings.prompt_lookup) if settings.prompt_lookup else None


def most_guesses(settings: HostSettings) -> int:
    """Returns the most tokens that are guessed at a time."""
    return settings.draft_tokens if settings.draft is not None else settings.prompt_lookup


@contextlib.contextmanager
def hidden_states_of(model: Any) -> Iterator[list[tuple[int, torch.Tensor]]]:
    """While open, appends to the yielded list for every forward pass: the position of the first token and the final
    hidden states (rows, hidden)."""
    got: list[tuple[int, torch.Tensor]] = []

    def on_pass(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        got.append((int(kwargs["position_ids"][0, 0]), output.last_hidden_state[0]))

    handle = model.get_decoder().register_forward_hook(on_pass, with_kwargs=True)
    try:
        yield got
    finally:
        handle.remove()


class GuessLength:
    """Chooses the number of guesses that yields the most tokens per second; 0 where guesses do not pay.

    A few numbers are each tried at first, and one of the others again now and then, since texts and times change.
    """

    def __init__(self, most: int, *, adaptive: bool) -> None:
        """Without ``adaptive`` the number is always ``most``."""
        self._numbers = sorted({0, 1, most // 2, most}) if adaptive else [most]
        self._tokens = dict.fromkeys(self._numbers, 0.0)
        self._seconds = dict.fromkeys(self._numbers, 0.0)
        self._to_try = list(self._numbers)
        self._trying: int | None = None
        self._n_left = 0  # passes until the next trial begins or the current one ends
        self._pause = _AGAIN
        self._settled = -1  # the best number before the last trial
        self._n_tries = 0
        self._number = -1
        self._is_new = False

    def choose(self) -> int:
        """Returns the most tokens to guess before the next pass."""
        if self._n_left == 0:
            self._next_period()
        self._n_left -= 1
        number = self._best if self._trying is None else self._trying
        self._is_new = number != self._number
        self._number = number
        return number

    def count(self, n_tokens: int, seconds: float) -> None:
        """Records a pass together with its guesses: the tokens it yielded, and its time.

        The first pass with a new number is not counted: the drafter first has to catch up with tokens it has not seen.
        """
        if not self._is_new:
            number = self._number
            self._tokens[number] = self._tokens[number] * _MEMORY + n_tokens
            self._seconds[number] = self._seconds[number] * _MEMORY + seconds

    def _next_period(self) -> None:
        others = [number for number in self._numbers if number != self._best]
        if self._trying is None and not self._to_try and others:
            self._to_try.append(others[self._n_tries % len(others)])
            self._n_tries += 1
        self._trying = self._to_try.pop() if self._to_try else None
        if self._trying is None:
            self._pause = min(_MOST, 2 * self._pause) if self._best == self._settled else _AGAIN
            self._n_left, self._settled = self._pause, self._best
        else:
            self._n_left = _TRY
            self._tokens[self._trying] *= _OLD
            self._seconds[self._trying] *= _OLD

    @property
    def _best(self) -> int:
        """The number of guesses that recently yielded the most tokens per second."""
        return max(self._numbers, key=lambda each: self._tokens[each] / (self._seconds[each] or 1))


class VerifiedGeneration:
    """The ``custom_generate`` argument of ``model.generate``: guesses from the second token on, verified in each pass.

    The prompt gets a pass without guesses: kernels are chosen by the number of rows, so added guesses could change how
    its rows are rounded. Sampling draws one random number for each token, as without guesses.
    """

    def __init__(self, drafter: Drafter, lengths: GuessLength, streamer: Any, recorder: Recorder) -> None:
        self._drafter = drafter
        self._lengths = lengths
        self._streamer = streamer
        self._recorder = recorder

    def __call__(
        self,
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> torch.Tensor:
        """Returns (1, n) int64, the prompt and the answer."""
        cache = model_kwargs["past_key_values"]
        self._recorder.prompt_tokens += input_ids.shape[1] - cache.get_seq_length()
        with contextlib.ExitStack() as stack:
            hidden = stack.enter_context(hidden_states_of(model)) if self._drafter.wants_hidden else []
            guesses: list[int] = []
            n_passes, is_over = 0, False
            while not is_over:
                started = perf_counter()
                if n_passes:
                    most = min(self._lengths.choose(), generation_config.max_length - input_ids.shape[1] - 1)
                    guesses = self._drafter.guess(input_ids[0].tolist(), most) if most > 0 else []
                    keep_past(cache, guesses=bool(guesses))  # not before: sliding layers would keep a long prompt
                self._recorder.own.next_phase = DECODE if n_passes else PREFILL
                logits = _forward(model, torch.cat([input_ids, input_ids.new_tensor([guesses])], dim=1), cache, guesses)
                for first, rows in sorted(hidden, key=lambda each: each[0]):  # chunks of a prompt may end in any order
                    self._drafter.take(first, rows)
                hidden.clear()
                n_new = 0
                for row, guess in enumerate([*guesses, -1]):
                    token = _choose(logits_processor(input_ids, logits[:, row].float()), generation_config.do_sample)
                    input_ids = torch.cat([input_ids, token[None]], dim=1)
                    self._streamer.put(token.cpu())
                    n_new += 1
                    is_over = bool(stopping_criteria(input_ids, None).all())
                    if is_over or int(token) != guess:
                        break
                self._recorder.completion_tokens += n_new
                self._recorder.count_verified(len(guesses), n_new - 1, n_new)
                if n_passes:
                    roll_back(cache, 1 + len(guesses) - n_new)
                if n_passes > 1:  # the drafter reads the prompt before its first guesses
                    self._lengths.count(n_new, perf_counter() - started)
                n_passes += 1
        self._streamer.end()
        return input_ids


def _forward(model: Any, tokens: torch.Tensor, cache: Any, guesses: list[int]) -> torch.Tensor:
    """Runs a pass over the tokens that are not in the cache; returns the last logits (1, 1 + guesses, vocabulary)."""
    past, length = cache.get_seq_length(), tokens.shape[1]
    n_rows = 1 + len(guesses)
    keep = {"logits_to_keep": n_rows} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    logits: torch.Tensor = model(
        input_ids=tokens[:, past:],
        attention_mask=torch.ones_like(tokens),
        position_ids=torch.arange(past, length, device=tokens.device)[None],
        past_key_values=cache,
        use_cache=True,
        **keep,
    ).logits
    return logits[:, -n_rows:]


def _choose(scores: torch.Tensor, is_sampled: bool) -> torch.Tensor:
    """Returns the next token (1,) int64, chosen as in transformers from processed scores (1, vocabulary)."""
    return torch.multinomial(scores.softmax(dim=-1), num_samples=1)[0] if is_sampled else scores.argmax(dim=-1)
