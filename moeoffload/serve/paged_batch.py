"""transformers' continuous batching, one step at a time: its scheduler and paged cache; loop and sampling are ours.

Its own loop ends for good when one forward pass fails, and knows neither seeds per request nor alternatives.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.cache_allocators.full_attention import FullAttentionCacheAllocator
from transformers.generation.continuous_batching.requests import RequestState, RequestStatus
from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING, FIFOScheduler
from transformers.generation.continuous_batching.utils import find_head_dim, find_num_key_value_heads

from moeoffload.errors import ModelError
from moeoffload.serve.paged_attention import IMPLEMENTATION

_LEAST_TURN: Final = 32
"""Rows of a prompt that are computed in its turn at least, if it has them."""
_FAIR: Final = "moeoffload_fair"


class FairScheduler(FIFOScheduler):  # type: ignore[misc]
    """Decodes first, as its base; then prompts, which share what is left of each step, the newcomers too."""

    def schedule_batch(self, token_budget: int, cache_budget: int) -> Any:
        """See `FIFOScheduler`."""
        states = [*self.active_requests.values(), *self.waiting_requests.values()]
        n_decoding = sum(state.status == RequestStatus.DECODING for state in states)
        n_prompts = min(len(states), self.max_requests_per_batch) - n_decoding
        left = token_budget - n_decoding
        self._turn = max(_LEAST_TURN, math.ceil(left / n_prompts)) if n_prompts > 0 else token_budget
        return super().schedule_batch(token_budget, cache_budget)

    def _schedule_request(self, state: Any, request_tokens: list[int], token_budget: int, *rest: Any) -> None:
        super()._schedule_request(state, request_tokens, min(token_budget, self._turn), *rest)


SCHEDULER_MAPPING.setdefault(_FAIR, FairScheduler)


@dataclass(frozen=True)
class CacheLimits:
    """Memory of keys and values in bytes, tokens of one page, rows of one step, requests of one step, and whether what
    ended requests leave behind is used again."""

    kv_bytes: int
    page_tokens: int
    step_rows: int
    requests: int
    reuse: bool


@dataclass(frozen=True)
class Member:
    """A request's part of a step: how many rows, whether a token of its answer comes out, how many tokens lie before
    these rows, and which tokens behind the first row are guesses."""

    request_id: str
    n_rows: int
    has_token: bool
    past: int
    guesses: tuple[int, ...] = ()

    @property
    def n_logits(self) -> int:
        """Rows whose logits are needed."""
        return 1 + len(self.guesses) if self.has_token else 0


class PagedBatch:
    """The requests of one model that are computed together. For one thread.

    Attributes:
        capacity_tokens: tokens whose keys and values fit into the memory.
    """

    def __init__(self, model: Any, limits: CacheLimits) -> None:
        """Takes the model over until `close`.

        Raises:
            ModelError: transformers cannot batch models of this kind.
        """
        self._model = model
        self._before = model.config._attn_implementation
        config = model.config.get_text_config()
        try:
            page_bytes = FullAttentionCacheAllocator.get_bytes_per_page(
                find_num_key_value_heads(config), find_head_dim(config), model.dtype, limits.page_tokens
            )
            n_blocks = max(2, limits.kv_bytes // (page_bytes * config.num_hidden_layers))
            manager = model.init_continuous_batching(
                generation_config=GenerationConfig(do_sample=False, eos_token_id=-1),
                continuous_batching_config=ContinuousBatchingConfig(
                    page_size=limits.page_tokens,
                    num_blocks=n_blocks,
                    max_batch_tokens=limits.step_rows,
                    max_requests_per_batch=limits.requests,
                    allow_block_sharing=limits.reuse,
                    use_async_batching=False,
                    use_cuda_graph=False,
                    auto_switch_to_flash=False,
                    scheduler_type=_FAIR,
                ),
            )
            if self._before == "sdpa":
                model.set_attn_implementation(IMPLEMENTATION)
            self._work = manager._create_batch_processor()
        except (ValueError, KeyError, AttributeError, TypeError, NotImplementedError) as error:
            self.close()
            kind = getattr(model.config, "model_type", "this")
            raise ModelError(f"requests of a {kind} model cannot be batched: {error}") from error
        self._manager = manager
        self._guesses: dict[str, tuple[Any, tuple[int, ...]]] = {}
        self._cache = self._work.cache
        self.reuses = bool(self._cache.use_prefix_sharing)
        """Whether beginnings of prompts are used again."""
        self.can_split = self._work.inputs_and_outputs.attention_mask is None
        """Whether a step can be run in parts: there is no mask over all of it."""
        self.capacity_tokens: int = self._cache.num_blocks * limits.page_tokens
        self.capacity_bytes: int = self._cache.cache_tensor.numel()

    def close(self) -> None:
        """Gives the model its own attention back. Idempotent."""
        with contextlib.suppress(ValueError):
            if self._model.config._attn_implementation != self._before:
                self._model.set_attn_implementation(self._before)

    def add(self, request_id: str, prompt: list[int], max_tokens: int, eos: Sequence[int]) -> None:
        """Queues a request."""
        state = RequestState(
            request_id=request_id, initial_tokens=prompt, max_new_tokens=max_tokens, eos_token_id=list(eos)
        )
        self._work.scheduler.add_waiting_request(state)

    def cancel(self, request_id: str) -> None:
        """Drops a request before the next step; unknown ones are none."""
        self._work.scheduler.set_request_cancellation(request_id)

    def guess(self, request_id: str, guesses: Sequence[int]) -> None:
        """Has the next step verify what may follow in a request that decodes; no more than it may still get."""
        state = self._work.scheduler.active_requests.get(request_id)
        if state is None or state.status != RequestStatus.DECODING or len(state.tokens_to_process) != 1:
            return
        left = state.max_new_tokens - len(state.generated_tokens) - 1
        kept = tuple(guesses[: max(0, left)])
        self._guesses[request_id] = (state, kept)
        state.tokens_to_process = [*state.tokens_to_process, *kept]

    @property
    def n_waiting(self) -> int:
        """Requests of which nothing was computed yet."""
        return len(self._work.scheduler.waiting_requests)

    @property
    def n_running(self) -> int:
        """Requests that are being computed."""
        return len(self._work.scheduler.active_requests)

    def cache_tokens(self) -> tuple[int, int]:
        """Tokens that requests hold, and those kept for later ones."""
        free = self._cache.compute_free_capacity()
        kept = sum(
            len(allocator.ledger.cached_blocks) * allocator.tokens_per_page
            for allocator in self._cache.cache_allocators.values()
        )
        return max(0, round((1 - free) * self.capacity_tokens) - kept), kept

    def prepare(self) -> list[Member]:
        """Chooses what the next step computes; nothing if nobody waits."""
        ready = self._work.prepare_next_batch()
        futures = self._work.inputs_and_outputs.requests_in_batch if ready else []
        members = []
        for future in futures:
            state = future.state
            # A request that had to give its room up is another one to transformers, without guesses.
            guessed, guesses = self._guesses.pop(state.request_id, (state, ()))
            past = state.position_offset - future.query_length
            members.append(
                Member(
                    state.request_id,
                    future.query_length,
                    future.has_new_token,
                    past,
                    guesses if guessed is state else (),
                )
            )
        for state, _ in self._guesses.values():  # of requests that this step has no room for
            del state.tokens_to_process[1:]
        self._guesses.clear()
        return members

    def forward(self, members: Sequence[Member], run: Callable[..., Any] | None = None) -> torch.Tensor:
        """Computes the step that was prepared: logits (rows, vocabulary) float32, of each member its ``n_logits`` last
        rows."""
        arguments = self._work.inputs_and_outputs.get_model_kwargs()
        rows: list[int] = []
        end = 0
        for member in members:
            end += member.n_rows
            rows += range(end - member.n_logits, end)
        # Some models cannot compute no logits at all.
        keep = torch.tensor(rows or [0], dtype=torch.int64, device=self._model.device)
        arguments["logits_indices"] = arguments["logits_to_keep"] = keep
        logits: torch.Tensor = (run or self._model)(**arguments).logits
        return logits[0, -len(keep) :].float()

    def commit(self, members: Sequence[Member], tokens: Sequence[list[int]]) -> None:
        """Gives each member that has a token its tokens, one and those guesses that were right; those that reached
        their end give their room back."""
        inputs = self._work.inputs_and_outputs
        plain, ones = [], []
        given = iter(tokens)
        for future, member in zip(inputs.requests_in_batch, members, strict=True):
            own = next(given) if member.has_token else []
            if member.guesses:
                self._commit_guesses(future.state, member, own)
                continue
            plain.append(future)
            ones += own
        inputs.requests_in_batch = plain
        inputs.num_request_in_batch = len(plain)
        inputs.output_ids[0, : len(ones)] = torch.tensor(ones, dtype=inputs.output_ids.dtype)
        self._work.update_batch()

    def _commit_guesses(self, state: Any, member: Member, tokens: Sequence[int]) -> None:
        """What transformers does for one token, for several; what is behind them in the cache is written anew."""
        state.position_offset = member.past
        finished = False
        for token in tokens:
            state.position_offset += 1
            finished = state.update_and_check_completion(token, None)
            if finished:
                break
        complete = {
            name: state.position_offset // allocator.tokens_per_page - member.past // allocator.tokens_per_page
            for name, allocator in self._cache.cache_allocators.items()
        }
        if self.reuses:
            self._cache.mark_complete_blocks(state, {name: n for name, n in complete.items() if n})
        if finished:
            self._work.scheduler.finish_request(state.request_id)
            self._work.scheduler.block_new_requests = False

    def fail(self) -> Iterator[str]:
        """After a step that raised: its members are dropped; their ids."""
        for future in self._work.inputs_and_outputs.requests_in_batch:
            request_id = future.state.request_id
            self._work.scheduler.finish_request(request_id)
            yield request_id

    def reset(self) -> None:
        """Forgets all requests, and everything in the cache."""
        self._guesses.clear()
        self._work.reset()
        self._cache.reset()
