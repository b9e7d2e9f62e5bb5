"""From a validated request to its response: reads prompts, submits them to the engine, formats their pieces."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive

from moeoffload.host.detokenizer import Detokenizer, StopStrings, TokenTexts
from moeoffload.serve.api_errors import ApiError, bad_request, unavailable
from moeoffload.serve.block_forms import MessagesForm, ResponsesForm
from moeoffload.serve.block_schemas import CountTokensRequest, MessagesRequest, ResponsesRequest
from moeoffload.serve.chat import Prompt, PromptReader
from moeoffload.serve.choices import Choice, Choices, Piece
from moeoffload.serve.engine import ServingEngine
from moeoffload.serve.forms import ChatForm, CompletionForm, Form
from moeoffload.serve.schemas import ChatRequest, CompletionRequest, GenerationRequest
from moeoffload.serve.sse import EventStream, unless_client_leaves
from moeoffload.text import one_line

COMPLETION_TOKENS: Final = 16
"""Default `max_tokens` of a completion, as in OpenAI's API; a chat may use the rest of the context."""


class Answering:
    """Answers requests for one model, of up to ``max_choices`` choices each; runs in the event loop."""

    def __init__(self, engine: ServingEngine, tokenizer: Any, model_name: str, max_choices: int) -> None:
        self.model_name = model_name
        self.created = int(time.time())
        self._engine = engine
        self._tokenizer = tokenizer
        self._n_vocabulary = len(tokenizer)
        self._texts = TokenTexts(tokenizer)
        self._reader = PromptReader(tokenizer, engine.n_vocabulary, engine.eos)
        self._max_choices = max_choices
        self._open: set[Choices] = set()

    def give_up_all(self) -> None:
        """Ends all running requests with an error that their clients receive."""
        for choices in tuple(self._open):
            choices.give_up(unavailable("The server is stopping and has given this request up.", 5.0))

    def close(self) -> None:
        """Stops the thread that reads prompts."""
        self._reader.close()

    def check_model(self, name: str) -> None:
        """Checks that ``name`` is the model's. Raises ApiError: 404."""
        if name != self.model_name:
            shown = one_line(name, 200)
            raise ApiError(404, f"The model '{shown}' does not exist.", param="model", code="model_not_found")

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        """The response to /v1/chat/completions. Raises ApiError: there is no answer."""
        form = ChatForm(self.model_name, self._texts, body.alternatives, body.include_usage)
        return await self._chat(body, form, request.receive)

    async def message(self, body: MessagesRequest, request: Request) -> Response:
        """The response to /v1/messages. Raises ApiError: there is no answer."""
        return await self._chat(body.chat(), MessagesForm(self.model_name), request.receive)

    async def count_tokens(self, body: CountTokensRequest) -> Response:
        """The response to /v1/messages/count_tokens. Raises ApiError: there would be no answer to such a message."""
        request = body.chat()
        self._check(request)
        prompt = await self._reader.read_chat(request)
        return JSONResponse({"input_tokens": len(prompt.tokens)})

    async def respond(self, body: ResponsesRequest, request: Request) -> Response:
        """The response to /v1/responses. Raises ApiError: there is no answer."""
        form = ResponsesForm(self.model_name, body.repeated())
        return await self._chat(body.chat(), form, request.receive)

    async def _chat(self, request: ChatRequest, form: Form, receive: Receive) -> Response:
        self._check(request)
        prompt = await self._reader.read_chat(request)
        max_tokens = self._room(prompt.tokens, request.max_completion_tokens or request.max_tokens, None, "messages")
        return await self._answer(request, form, [(prompt, max_tokens)], request.alternatives, receive)

    async def complete(self, body: CompletionRequest, request: Request) -> Response:
        """The response to /v1/completions. Raises ApiError: there is no answer."""
        self._check(body, len(body.prompt))
        prompts = [
            (prompt, self._room(prompt.tokens, body.max_tokens, COMPLETION_TOKENS, "prompt"))
            for prompt in await self._reader.read_completion(body)
        ]
        echoes = [self._echo(each) if body.echo else "" for each in body.prompt for _ in range(body.n or 1)]
        form = CompletionForm(self.model_name, self._texts, body.logprobs, body.include_usage, echoes)
        return await self._answer(body, form, prompts, body.logprobs, request.receive)

    def _check(self, request: GenerationRequest, n_prompts: int = 1) -> None:
        self.check_model(request.model)
        request.check(self._n_vocabulary)
        if n_prompts * (request.n or 1) > self._max_choices:
            param = "prompt" if n_prompts > 1 else "n"
            raise bad_request(f"At most {self._max_choices} answers can be asked for at a time.", param)
        if not self._engine.is_ready:
            raise unavailable("The server takes no requests now.", 5.0)

    def _echo(self, prompt: str | list[int]) -> str:
        if isinstance(prompt, str):
            return prompt
        text: str = self._tokenizer.decode(prompt, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def _room(self, prompt: Sequence[int], wanted: int | None, default: int | None, param: str) -> int:
        """The number of tokens that the answer may have."""
        most, n = self._engine.context_tokens, len(prompt)
        if not prompt:
            raise bad_request("The prompt is empty: it has no tokens.", param)
        if n + (least := 1 if wanted is None else wanted) > most:
            raise bad_request(
                f"This model's maximum context length is {most} tokens. However, you requested {n + least} tokens "
                f"({n} in the {param}, {least} in the completion). Please reduce the length of the {param} or the "
                "completion.",
                param,
                "context_length_exceeded",
            )
        return wanted if wanted is not None else min(default or most, most - n)

    async def _answer(
        self,
        request: GenerationRequest,
        form: Form,
        prompts: Sequence[tuple[Prompt, int]],
        alternatives: int | None,
        receive: Receive,
    ) -> Response:
        n, defaults = request.n or 1, self._engine.sampling_defaults
        choices = Choices(self._engine)

        def usage() -> dict[str, Any]:
            """Token counts of all prompts, and of all choices."""
            n_prompt = sum(len(prompt.tokens) for prompt, _ in prompts)
            n_completion = sum(choice.n_tokens for choice in choices.choices)
            return {
                "prompt_tokens": n_prompt,
                "completion_tokens": n_completion,
                "total_tokens": n_prompt + n_completion,
                "prompt_tokens_details": {"cached_tokens": sum(each.reused_tokens for each in choices.choices[::n])},
            }

        async def chunks() -> AsyncGenerator[dict[str, Any], None]:
            for chunk in form.opening(len(choices.choices), usage()):
                yield chunk
            async for piece in choices.pieces():
                for chunk in form.chunks(piece):
                    yield chunk
            for chunk in form.closing(usage()):
                yield chunk

        async def whole() -> dict[str, Any]:
            pieces: list[list[Piece]] = [[] for _ in choices.choices]
            async for piece in choices.pieces():
                pieces[piece.index].append(piece)
            return form.whole(pieces, usage())

        with contextlib.ExitStack() as at_end:
            self._open.add(choices)
            at_end.callback(self._open.discard, choices)
            at_end.callback(choices.close)
            for prompt, max_tokens in prompts:
                for number in range(n):
                    options = request.options(number, max_tokens, alternatives, prompt.matcher, defaults)
                    choices.submit(prompt.tokens, options, self._choice(len(choices.choices), request, prompt))
            if request.stream:
                return EventStream(chunks(), at_end.pop_all().close, form.error, form.has_names)
            return await unless_client_leaves(receive, whole())

    def _choice(self, index: int, request: GenerationRequest, prompt: Prompt) -> Choice:
        skips = request.skip_special_tokens is not False and not prompt.with_marks
        texts = Detokenizer(self._tokenizer, skip_special_tokens=skips)
        return Choice(
            index, texts, StopStrings(request.stop), prompt.parser(), prompt.one_call, shows_end=request.scores_prompt
        )
