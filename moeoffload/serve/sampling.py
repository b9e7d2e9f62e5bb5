"""Samples the next token of each request from its logits. Each request has its own random numbers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

import torch

from moeoffload.serve.grammar import allowed_by, reason
from moeoffload.serve.request import SamplingOptions, TokenChoice

_LEAST_TEMPERATURE: Final = 1e-30
"""Below it the most likely token is taken, as at 0: scores that are divided by less may exceed float32."""
_SCORED_ROWS: Final = 64  # rows of a prompt that are converted to float32 at a time


class PromptScores:
    """Collects log probabilities of a prompt's tokens as parts of it are computed."""

    def __init__(self, tokens: Sequence[int], n_alternatives: int) -> None:
        self._tokens = list(tokens)
        self._n_alternatives = n_alternatives
        self.choices = [TokenChoice(self._tokens[0])]  # the first has no probability

    def take(self, past: int, logits: torch.Tensor) -> None:
        """Takes ``logits`` (rows, vocabulary) of the tokens from index ``past`` on; a row predicts the next token."""
        del self.choices[past + 1 :]  # a preempted sequence is computed again
        n_rows = min(len(logits), len(self._tokens) - past - 1)
        for start in range(0, n_rows, _SCORED_ROWS):
            rows = logits[start : min(n_rows, start + _SCORED_ROWS)].float().log_softmax(dim=-1)
            first = past + 1 + start
            tokens = self._tokens[first : first + len(rows)]
            self.choices += _scored(rows, tokens, self._n_alternatives)


class Sampler:
    """Samples the tokens of one request."""

    def __init__(self, options: SamplingOptions, prompt: Sequence[int] = ()) -> None:
        self._options = options
        self.prompt_scores = PromptScores(prompt, options.alternatives or 0) if options.with_prompt else None
        self._seen = set(prompt) if options.repetition_penalty != 1 else set()
        self._counts: Counter[int] = Counter()
        self._generator = torch.Generator()
        self._matcher = options.matcher.deep_copy() if options.matcher is not None else None
        self.is_greedy = options.temperature < _LEAST_TEMPERATURE  # whether the most likely token is taken
        self.is_plain = (
            self.is_greedy
            and options.alternatives is None
            and self._matcher is None
            and options.repetition_penalty == 1
            and not (options.frequency_penalty or options.presence_penalty or options.bias)
        )
        """Whether sampling is just an argmax over the raw logits."""
        if options.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(options.seed)

    @property
    def error(self) -> str:
        """Why the answer cannot continue (its grammar became too complex), in which case the last token does not count;
        empty while it can."""
        return reason(self._matcher.get_error()) if self._matcher is not None else ""

    def choose(self, logits: torch.Tensor) -> TokenChoice:
        """Samples the next token from ``logits`` (vocabulary,) float32, which are not changed.

        Log probabilities are those of the model, before temperature, penalties and truncation.
        """
        options = self._options
        scores = self._penalised(logits)
        if self._matcher is not None:
            scores = allowed_by(self._matcher, scores)
        token = int(scores.argmax()) if self.is_greedy else self._draw(scores / options.temperature)
        self._counts[token] += 1
        if options.repetition_penalty != 1:
            self._seen.add(token)
        if self._matcher is not None:
            self._matcher.consume_token(token)
        if options.alternatives is None:
            return TokenChoice(token)
        return next(_scored(logits[None].log_softmax(dim=-1), [token], options.alternatives))

    def _penalised(self, logits: torch.Tensor) -> torch.Tensor:
        options = self._options
        penalised = bool(self._counts) and bool(options.frequency_penalty or options.presence_penalty)
        if not penalised and not options.bias and not self._seen:
            return logits
        scores = logits.clone()
        if self._seen:
            tokens = list(self._seen)
            seen, penalty = scores[tokens], options.repetition_penalty
            scores[tokens] = torch.where(seen > 0, seen / penalty, seen * penalty)
        if penalised:
            tokens = list(self._counts)
            counts = torch.tensor(list(self._counts.values()), dtype=scores.dtype, device=scores.device)
            scores[tokens] -= counts * options.frequency_penalty + options.presence_penalty
        for token, bias in options.bias.items():
            scores[token] += bias
        return scores

    def _draw(self, scores: torch.Tensor) -> int:
        """Draws a token after min-p, top-k and top-p. On the CPU, so that a seed gives the same on every device."""
        options = self._options
        scores = scores.cpu()
        if options.min_p > 0:
            least = scores.max() + math.log(options.min_p)
            scores = scores.masked_fill(scores < least, -torch.inf)
        n_tokens = scores.numel()
        if 0 < options.top_k < n_tokens or options.top_p < 1:
            kept = options.top_k if 0 < options.top_k < n_tokens else n_tokens
            best, tokens = scores.topk(kept)
            probabilities = best.softmax(dim=-1)
            if options.top_p < 1:
                # The token that reaches top-p is still included.
                before = probabilities.cumsum(dim=-1) - probabilities
                n_left = max(1, int((before < options.top_p).sum()))
                probabilities, tokens = probabilities[:n_left], tokens[:n_left]
        else:
            probabilities, tokens = scores.softmax(dim=-1), None
        # With exponential times at these rates, token i is the first with its probability.
        times = torch.empty_like(probabilities).exponential_(generator=self._generator)
        drawn = int((probabilities / times).argmax())
        return drawn if tokens is None else int(tokens[drawn])


def _scored(logprobs: torch.Tensor, tokens: Sequence[int], n_alternatives: int) -> Iterator[TokenChoice]:
    """The ``tokens`` with their log probabilities, of each its row of ``logprobs`` (rows, vocabulary)."""
    own = logprobs.gather(1, torch.tensor(tokens, device=logprobs.device)[:, None])[:, 0].tolist()
    best = logprobs.topk(min(n_alternatives, logprobs.shape[1]), dim=-1)
    others = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    for token, logprob, (names, values) in zip(tokens, own, others, strict=True):
        yield TokenChoice(token, logprob, tuple(zip(names, values, strict=True)))
