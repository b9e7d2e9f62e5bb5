"""Chooses the next token of each request from its logits. Each request draws from its own random numbers."""

from __future__ import annotations

from collections import Counter

import torch

from moeoffload.serve.grammar import GrammarState
from moeoffload.serve.request import SamplingOptions, TokenChoice


class Sampler:
    """Chooses the tokens of one request."""

    def __init__(self, options: SamplingOptions) -> None:
        self._options = options
        self._counts: Counter[int] = Counter()
        self._generator: torch.Generator | None = None
        self._grammar = GrammarState(options.matcher) if options.matcher is not None else None
        self.is_greedy = options.temperature == 0  # whether the likeliest token is taken
        self.is_plain = (
            self.is_greedy
            and options.alternatives is None
            and self._grammar is None
            and not (options.frequency_penalty or options.presence_penalty or options.bias)
        )
        """Whether an argmax over the raw logits is all there is to do."""
        if not self.is_greedy:
            self._generator = torch.Generator()
            if options.seed is None:
                self._generator.seed()
            else:
                self._generator.manual_seed(options.seed)

    @property
    def error(self) -> str:
        """Why the answer cannot go on; what was chosen last does not count then. Empty while it can."""
        return self._grammar.error if self._grammar is not None else ""

    def choose(self, logits: torch.Tensor) -> TokenChoice:
        """The next token, from ``logits`` (vocabulary,) float32, which stay as they are.

        Log probabilities are those of the model, before temperature, penalties and cuts.
        """
        options = self._options
        scores = self._penalised(logits)
        if self._grammar is not None:
            scores = self._grammar.allow(scores)
        token = int(scores.argmax()) if self.is_greedy else self._draw(scores / options.temperature)
        self._counts[token] += 1
        if self._grammar is not None:
            self._grammar.take(token)
        if options.alternatives is None:
            return TokenChoice(token)
        logprobs = logits.log_softmax(dim=-1)
        best = logprobs.topk(min(options.alternatives, logprobs.numel()))
        alternatives = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        return TokenChoice(token, float(logprobs[token]), alternatives)

    def _penalised(self, logits: torch.Tensor) -> torch.Tensor:
        options = self._options
        penalised = bool(self._counts) and bool(options.frequency_penalty or options.presence_penalty)
        if not penalised and not options.bias:
            return logits
        scores = logits.clone()
        if penalised:
            tokens = list(self._counts)
            counts = torch.tensor(list(self._counts.values()), dtype=scores.dtype, device=scores.device)
            scores[tokens] -= counts * options.frequency_penalty + options.presence_penalty
        for token, bias in options.bias.items():
            scores[token] += bias
        return scores

    def _draw(self, scores: torch.Tensor) -> int:
        """Draws from what top-k and top-p leave. On the CPU, so that a seed means the same on every device."""
        options = self._options
        scores = scores.cpu()
        n_tokens = scores.numel()
        if 0 < options.top_k < n_tokens or options.top_p < 1:
            kept = options.top_k if 0 < options.top_k < n_tokens else n_tokens
            best, tokens = scores.topk(kept)
            probabilities = best.softmax(dim=-1)
            if options.top_p < 1:
                # The token that reaches top-p still belongs to it.
                before = probabilities.cumsum(dim=-1) - probabilities
                n_left = max(1, int((before < options.top_p).sum()))
                probabilities, tokens = probabilities[:n_left], tokens[:n_left]
        else:
            probabilities, tokens = scores.softmax(dim=-1), None
        # Of exponential times with these rates the first is token i with its probability.
        times = torch.empty_like(probabilities).exponential_(generator=self._generator)
        drawn = int((probabilities / times).argmax())
        return drawn if tokens is None else int(tokens[drawn])
