"""The serving engine: a thread that runs the model one step after another over the current requests.

Requests join and leave between steps. A step computes one row for each decoding answer and, with the remaining rows,
parts of prompts.
"""

from __future__ import annotations

import logging
import threading
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import Final

import torch

from moeoffload.config import ServeSettings
from moeoffload.errors import BusyError, MoeOffloadError, PromptError, ServerError
from moeoffload.host.model import eos_tokens, recommended_sampling
from moeoffload.host.session import OffloadedModel
from moeoffload.serve.batch_runner import PAGE_TOKENS, BatchRunner
from moeoffload.serve.request import FinishReason, OnProgress, Progress, SamplingOptions, TokenChoice
from moeoffload.serve.sequence import Sequence, Share
from moeoffload.serve.stats import CacheUse, ServingStats

logger = logging.getLogger(__name__)

_IDLE_WAIT_S: Final = 0.5
_STOP_TIMEOUT_S: Final = 30.0


class ServingEngine:
    """Answers requests with an open model, which it owns until `close`. Use it in a ``with`` block, or close it."""

    def __init__(self, offloaded: OffloadedModel, settings: ServeSettings) -> None:
        """Starts the engine's thread, which runs the model once to warm up.
        Raises ModelError: requests of this model cannot be batched; ServerError: the first step failed."""
        self._offloaded = offloaded
        self._settings = settings
        self.eos = eos_tokens(offloaded.model)  # tokens that end an answer
        self._batch = BatchRunner(offloaded, settings)
        most = getattr(offloaded.checkpoint.config.get_text_config(), "max_position_embeddings", None)
        room = self._batch.runner.n_pages * PAGE_TOKENS
        self.context_tokens = min(most or room, room)  # tokens that prompt and answer of one request may have together
        if most and room < most:
            logger.warning("a request has at most %d tokens instead of %d: kv-gib holds no more", room, most)
        self.sampling_defaults = recommended_sampling(offloaded.model)
        self.stats = ServingStats(CacheUse(total_tokens=room, total_bytes=self._batch.runner.total_bytes))
        self.n_vocabulary: int = offloaded.model.config.get_text_config().vocab_size
        self._requests: set[Sequence] = set()
        self._changes: list[Sequence] = []  # of new requests, and once more when they are cancelled
        self._changing = threading.Condition()
        """Guards the two attributes above and the three below, and tells of changes and of ended requests; never held
        across a step."""
        self._draining = False
        self._stopping = False
        self.failure: BaseException | None = None  # what ended the engine for good
        self._thread = threading.Thread(target=self._run, name="serving", daemon=True)
        self._thread.start()
        try:
            self._warm_up()
        except BaseException:
            self.close()
            raise

    # -- for any thread

    @property
    def is_ready(self) -> bool:
        """Whether requests are accepted: the engine is neither draining, stopping nor failed."""
        return self._thread.is_alive() and not (self.failure or self._draining or self._stopping)

    @property
    def n_requests(self) -> int:
        """How many requests have been accepted and have not ended."""
        return len(self._requests)

    def submit(self, prompt: list[int], options: SamplingOptions, on_progress: OnProgress) -> Sequence:
        """Queues a request.
        Raises PromptError: the prompt is empty or does not fit, or has a token outside the vocabulary; BusyError: the
        queue is full or the engine is draining, with the seconds to wait before a retry; ServerError: the engine has
        failed."""
        if not prompt:
            raise PromptError("the prompt is empty")
        # A token outside the vocabulary would fail the step, and with it all requests.
        for token in (min(prompt), max(prompt), *options.bias):
            if not 0 <= token < self.n_vocabulary:
                raise PromptError(f"token {token} is none of the model's, which are 0 to {self.n_vocabulary - 1}")
        if len(prompt) + options.max_tokens > self.context_tokens:
            raise PromptError(
                f"the prompt has {len(prompt)} tokens and the answer may have {options.max_tokens}; "
                f"the context holds {self.context_tokens}"
            )
        request = Sequence(list(prompt), options, on_progress)
        with self._changing:
            if self.failure is not None:
                raise ServerError(f"the engine has failed: {self.failure}")
            if self._draining or self._stopping:
                self.stats.requests.rejected += 1
                raise ServerError("the server is shutting down")
            if len(self._requests) >= self._settings.max_running + self._settings.max_waiting:
                self.stats.requests.rejected += 1
                raise BusyError(
                    f"{len(self._requests)} requests are running or waiting, more are not taken", self._retry_after_s()
                )
            self._requests.add(request)
            self._changes.append(request)
            self._changing.notify_all()
        return request

    def cancel(self, request: Sequence, *, complete: bool = False) -> None:
        """Ends a request before the next step, if it has not ended; from any thread, at any time, idempotent. Its KV
        cache is free within one step. A request whose client has everything it needs is ``complete`` and counts as
        finished."""
        with self._changing:
            if request not in self._requests:
                return
            request.is_complete = request.is_complete or complete
            self._changes.append(request)
            self._changing.notify_all()

    def drain(self, timeout_s: float) -> bool:
        """Stops accepting requests and waits for the accepted ones; False if some are not done within ``timeout_s``."""
        with self._changing:
            self._draining = True
            return self._changing.wait_for(lambda: not self._requests, timeout_s)

    def close(self) -> None:
        """Cancels running requests, ends the thread and releases the model. Idempotent."""
        with self._changing:
            self._stopping = True
            self._changing.notify_all()
        self._thread.join(_STOP_TIMEOUT_S)
        self._batch.close()

    def __enter__(self) -> ServingEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def note_refused(self) -> None:
        """Counts a request that was refused before `submit`; called in the event loop."""
        with self._changing:
            self.stats.requests.rejected += 1

    def _retry_after_s(self) -> float:
        """Estimates when the next running request ends: the mean duration of an answer / ``max_running``."""
        steps, tokens, counts = self.stats.steps, self.stats.tokens, self.stats.requests
        if not counts.finished or not steps.steps:
            return 1.0
        answer_s = tokens.completion / counts.finished * steps.seconds / steps.steps
        return min(60.0, max(1.0, answer_s / max(1, self._settings.max_running)))

    # -- the engine's thread

    def _run(self) -> None:
        """Runs steps until `close`. If an exception escapes, every request is still ended, and `failure` says why no
        more are accepted."""
        last = Progress(finish=FinishReason.CANCELLED)
        try:
            self._run_steps()
        except BaseException as error:
            logger.critical("the engine has failed and answers no more requests", exc_info=True)
            last = Progress(finish=FinishReason.ERROR, error=ServerError(f"the engine has failed: {error}"))
            with self._changing:
                self.failure = error
        with self._changing:
            left = list(self._requests)
            self._requests.clear()
            self._changing.notify_all()
        counts = self.stats.requests
        counts.running = counts.waiting = self.stats.cache.used_tokens = 0
        if self.failure is not None:
            counts.failed += len(left)
        else:
            counts.cancelled += len(left)
        for request in left:
            _tell(request, last)

    @torch.inference_mode()
    def _run_steps(self) -> None:
        while not self._stopping:
            try:
                if not self._step():
                    with self._changing:
                        self._changing.wait_for(lambda: self._changes or self._stopping, _IDLE_WAIT_S)
            except Exception as error:  # torch and transformers may raise anything; later requests still run
                if not isinstance(error, MoeOffloadError):
                    logger.exception("a step failed")
                self._fail_all(error)

    def _step(self) -> bool:
        """Computes one step; returns False if there was nothing to do."""
        self._take_changes()
        shares = self._batch.schedule()
        self._count_requests()
        if not shares:
            return False
        try:
            per_share, took_s = self._batch.compute(shares)
        except MoeOffloadError as error:
            logger.warning("a step of %d requests failed: %s", len(shares), error)
            for share in shares:
                self._end(share.sequence, Progress(finish=FinishReason.ERROR, error=error))
            return True
        self._count_step(shares, per_share, took_s)
        now = perf_counter()
        for share, choices in zip(shares, per_share, strict=True):
            request = share.sequence
            if request.reused is None:
                request.reused = share.past
                self._offloaded.recorder.prompt_tokens += request.n_prompt - share.past
                self.stats.tokens.reused += share.past
            if reason := request.sampler.error:
                self._end(request, Progress(finish=FinishReason.ERROR, error=PromptError(reason)))
                continue
            for choice in choices:
                self._take_token(request, choice, now)
                if request.is_over:  # tokens accepted after the end do not count
                    break
        return True

    def _take_changes(self) -> None:
        with self._changing:
            changes, self._changes = self._changes, []
        for request in changes:
            if not request.is_scheduled:
                request.is_scheduled = True
                self._batch.scheduler.add(request)
                self.stats.tokens.prompt += request.n_prompt
            elif not request.is_over:
                self._end(request, Progress(finish=FinishReason.CANCELLED))

    def _count_requests(self) -> None:
        counts, cache, scheduler = self.stats.requests, self.stats.cache, self._batch.scheduler
        counts.running, counts.waiting = len(scheduler.running), len(scheduler.waiting)
        cache.used_tokens, cache.kept_tokens = self._batch.blocks.cache_tokens()

    def _count_step(self, shares: list[Share], per_share: list[list[TokenChoice]], took_s: float) -> None:
        steps, tokens = self.stats.steps, self.stats.tokens
        steps.steps += 1
        steps.seconds += took_s
        self.stats.step_rows.add(sum(len(share.tokens) for share in shares))
        tokens.guessed += sum(share.n_guesses for share in shares)
        tokens.guessed_right += sum(max(0, len(choices) - 1) for choices in per_share)

    def _take_token(self, request: Sequence, choice: TokenChoice, now: float) -> None:
        scores = request.sampler.prompt_scores
        prompt = tuple(scores.choices) if scores is not None and not request.n_told else ()
        if request.options.max_tokens == 0:
            self._end(request, Progress(None, FinishReason.LENGTH, reused_tokens=request.reused or 0, prompt=prompt))
            return
        request.n_told += 1
        self.stats.tokens.completion += 1
        self._offloaded.recorder.completion_tokens += 1
        if request.n_told == 1:
            self.stats.first_token_s.add(now - request.submitted)
        else:
            self.stats.between_tokens_s.add(now - request.last_token)
        request.last_token = now
        finish = None
        if choice.token in self.eos and not request.options.ignore_eos:
            finish = FinishReason.STOP
        elif request.n_told >= request.options.max_tokens:
            finish = FinishReason.LENGTH
        progress = Progress(choice, finish, reused_tokens=request.reused or 0, prompt=prompt)
        if finish is None:
            _tell(request, progress)
        else:
            self._end(request, progress)

    def _end(self, request: Sequence, progress: Progress) -> None:
        request.is_over = True
        if request.is_scheduled:
            self._batch.scheduler.remove(request)
        counts = self.stats.requests
        if progress.finish is FinishReason.CANCELLED and not request.is_complete:
            counts.cancelled += 1
        elif progress.finish is FinishReason.ERROR:
            counts.failed += 1
        else:
            counts.finished += 1
        with self._changing:
            self._requests.remove(request)
            self._changing.notify_all()
        _tell(request, progress)

    def _fail_all(self, error: Exception) -> None:
        """Fails all requests after an unexpected error, when the cache cannot be trusted."""
        told = error if isinstance(error, MoeOffloadError) else ServerError(f"internal error: {error}")
        with self._changing:
            left = [request for request in self._requests if request.is_scheduled]
        for request in left:
            self._end(request, Progress(finish=FinishReason.ERROR, error=told))
        self._batch.scheduler.reset()

    def _warm_up(self) -> None:
        """Runs a request of a few tokens, so that compilation and first allocations happen before the first client."""
        told: SimpleQueue[Progress] = SimpleQueue()
        options = SamplingOptions(max_tokens=2, temperature=0, ignore_eos=True)
        self.submit([0] * min(4, self.context_tokens - 2), options, told.put)
        # A dispatch may run into its deadline, after which a lost server's experts are read.
        settings = self._offloaded.settings
        timeout_s = settings.dispatch_timeout_s + settings.load_timeout_s
        progress = Progress()
        while progress.finish is None:
            try:
                progress = told.get(timeout=timeout_s)
            except Empty:
                raise ServerError(f"a first step did not end within {timeout_s:g} s") from None
        if progress.error is not None:
            raise progress.error
        self.stats = ServingStats(self.stats.cache)
        self._offloaded.recorder.reset()


def _tell(request: Sequence, progress: Progress) -> None:
    """Passes progress to a client's callback; its exceptions must not affect other requests."""
    try:
        request.tell(progress)
    except Exception:
        logger.exception("a client was not told of its request's progress")
