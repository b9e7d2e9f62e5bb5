"""Loads a transformers model without reading its routed experts, binds its experts modules to a dispatcher; and loads
what drafts tokens for it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import logging as transformers_logging

from moeoffload.checkpoint import BUILDING, Checkpoint
from moeoffload.checkpoint.draft_head import build_head
from moeoffload.errors import ModelError
from moeoffload.host.local_experts import LocalExperts
from moeoffload.host.rollback import prepare_rollback
from moeoffload.kernels.fast_dense import accelerate_dense
from moeoffload.placement import ExpertTable

IMPLEMENTATION: Final = "moeoffload"  # the name registered with transformers (`experts_implementation`)


def remote_experts(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Experts function for transformers' ``ExpertsInterface``: hidden (n, hidden), top-k ids (n, top_k) int64, weights
    (n, top_k) -> (n, hidden) in the dtype of hidden; ``self`` is the experts module of one layer.
    Raises ModelError: the module belongs to no open model."""
    call: Callable[..., torch.Tensor] | None = getattr(self, "moeoffload_call", None)
    if call is None:
        raise ModelError("this model's routed experts are not attached to expert servers; use moeoffload.open_model")
    sums = call(hidden_states, top_k_index, top_k_weights)
    if torch.is_grad_enabled() and (hidden_states.requires_grad or top_k_weights.requires_grad):
        return cast(torch.Tensor, _NoGradient.apply(sums, hidden_states, top_k_weights))  # type: ignore[no-untyped-call]
    return sums


class _NoGradient(torch.autograd.Function):
    """Refuses a backward pass, whose gradients would lack the contribution of the experts."""

    @staticmethod
    def forward(ctx: Any, sums: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        """Returns ``sums`` (n, hidden) unchanged."""
        return sums.view_as(sums)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Raises ModelError."""
        raise ModelError("no gradient passes through routed experts on servers: train with transformers alone")


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, remote_experts)


def load_dense_model(checkpoint: Checkpoint, device: torch.device, tensors: Mapping[str, Any] | None = None) -> Any:
    """Returns the transformers model of ``checkpoint`` on ``device``, with experts modules without parameters.

    Only dense tensors are read, or taken from ``tensors`` if given. The model is in eval mode; its experts modules
    cannot run before `bind_experts`.
    Raises ModelError: dense tensors are missing or damaged, or transformers cannot load the model.
    """
    with BUILDING, without_expert_parameters(checkpoint.experts_classes), quiet_transformers():
        try:
            model, info = checkpoint.model_class.from_pretrained(  # type: ignore[attr-defined]
                None,
                config=checkpoint.config,
                state_dict=checkpoint.dense_tensors() if tensors is None else tensors,
                dtype=checkpoint.dtype,
                experts_implementation=IMPLEMENTATION,
                output_loading_info=True,
            )
        except Exception as error:  # transformers and safetensors may raise anything for a damaged checkpoint
            raise ModelError(f"{checkpoint.path}: transformers cannot load it: {_one_line(error)}") from error
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelError(f"{checkpoint.path}: {len(missing)} dense tensors are missing, among them {missing[0]}")
    if checkpoint.folder is not None:
        model.generation_config = _generation_config(checkpoint.folder)
    return model.to(device).eval()


def bind_experts(model: nn.Module, checkpoint: Checkpoint, call: Callable[..., torch.Tensor]) -> None:
    """Binds each experts module of ``model`` to ``call``, whose first argument is the number of the MoE layer."""
    for layer in checkpoint.layers:
        experts: Any = model.get_submodule(layer.module_name)
        experts.moeoffload_call = functools.partial(call, layer.index)
    saving: Any = model
    saving.save_pretrained = functools.partial(_refuse_to_save, checkpoint.path)


def _refuse_to_save(folder: Path, *args: object, **kwargs: object) -> None:
    raise ModelError(f"a model whose routed experts are on servers cannot be saved; copy {folder} instead")


def load_tokenizer(checkpoint: Checkpoint) -> Any:
    """Returns the tokenizer beside the checkpoint, or in the GGUF file. Raises ModelError: none can be read."""
    folder = checkpoint.folder
    try:
        if folder is None:
            tokenizer = _gguf_tokenizer(checkpoint.path)
        else:
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of a type that depends on the kind of tokenizer
        raise ModelError(f"{checkpoint.path}: its tokenizer cannot be read: {_one_line(error)}") from error
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        # For some families transformers returns an empty tokenizer if there is no tokenizer file.
        raise ModelError(f"{checkpoint.path}: there is no tokenizer beside the model")
    return tokenizer


def _gguf_tokenizer(file: Path) -> Any:
    """Returns the tokenizer in a GGUF file, whose header was checked before."""
    # Imported here: it imports the tokenizers of half a dozen families.
    from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

    architecture, vocabulary, settings = get_gguf_tokenizer(str(file))
    backend, more = convert_gguf_tokenizer(architecture, vocabulary)
    return PreTrainedTokenizerFast(tokenizer_object=backend, **settings, **more)


def eos_tokens(model: Any) -> tuple[int, ...]:
    """Returns the tokens that end an answer of a transformers model."""
    eos = model.generation_config.eos_token_id
    if eos is None:
        eos = getattr(model.config.get_text_config(), "eos_token_id", None)
    return () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)


def recommended_sampling(model: Any) -> dict[str, float]:
    """Returns the sampling settings that a model's publisher recommends, as far as given: temperature (0 is greedy),
    top_p, top_k, min_p and repetition_penalty."""
    config = model.generation_config
    if config.do_sample is False:
        return {"temperature": 0.0}
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    told = {name: getattr(config, name, None) for name in names}
    return {name: value for name, value in told.items() if isinstance(value, int | float)}


def load_draft_model(folder: Path, model: Any) -> Any:
    """Loads the whole model in ``folder``, on the device and in the dtype of ``model``, as its draft model.
    Raises ModelError: it cannot be loaded, or has another vocabulary size."""
    mine, options = model.config.get_text_config().vocab_size, {"trust_remote_code": False, "local_files_only": True}
    try:
        with quiet_transformers():
            other = AutoConfig.from_pretrained(folder, **options).get_text_config().vocab_size
            if mine == other:
                draft = AutoModelForCausalLM.from_pretrained(folder, dtype=model.dtype, **options)
    except Exception as error:  # as in `load_dense_model`
        raise ModelError(f"--draft: {folder}: transformers cannot load it: {_one_line(error)}") from error
    if mine != other:
        raise ModelError(f"--draft: {folder} has a vocabulary of {other} tokens, the model one of {mine}")
    prepare_rollback(draft)
    return draft.to(model.device).eval()


def load_draft_head(about: Checkpoint, main: Any, *, fast_dense: bool) -> Any:
    """Returns transformers' `MtpModel` with the weights of ``about`` (see `Checkpoint.draft_head`) and the embedding
    and output layer of ``main``. Its experts stay on the host: it runs between passes and uses no server.
    Raises ModelError: one of its tensors is missing."""
    device = main.device
    with without_expert_parameters(about.experts_classes), torch.device("meta"):
        head = build_head(main, about.dtype)
    how = LoadStateDictConfig(
        weight_mapping=head.get_weight_conversions(main), device_map={"": device}, dtype=about.dtype
    )
    with quiet_transformers():
        info, _ = convert_and_load_state_dict_in_model(head, dict(about.dense_tensors()), how)
    own = {name for name, _ in (*head.layers.named_parameters(), *head.layers.named_buffers())}
    missing = sorted(own & {name.removeprefix("layers.") for name in info.missing_keys})
    if missing:
        raise ModelError(f"--draft own: {about.path}: the layer's {missing[0]} is missing")
    head.tie_with_main_model(main)
    local = LocalExperts(about, ExpertTable(tuple(tuple(range(each.n_experts)) for each in about.layers)), device)

    def experts(layer: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        sums = torch.empty(hidden.shape, dtype=torch.float32, device=device)
        local.compute(layer, hidden, ids, weights, sums)
        return sums.to(hidden.dtype)

    bind_experts(head, about, experts)
    if fast_dense and device.type == "cpu":
        accelerate_dense(head.layers)
    return head.eval()


def _generation_config(folder: Path) -> GenerationConfig:
    """Returns the publisher's generation settings, as `from_pretrained` finds them beside weights."""
    try:
        return GenerationConfig.from_pretrained(folder, local_files_only=True)
    except OSError:
        return GenerationConfig.from_pretrained(folder, "config.json", local_files_only=True, _from_model_config=True)


def _one_line(error: Exception) -> str:
    """Returns the message of another package's error in one line."""
    return " ".join(str(error).split()) or type(error).__name__


@contextlib.contextmanager
def without_expert_parameters(classes: Sequence[type[nn.Module]]) -> Iterator[None]:
    """While open, new modules of ``classes`` lose their parameters as soon as they are built.

    transformers then finds no place for expert tensors and never reads them from the files.
    """

    def dropping(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def init(self: nn.Module, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            for name, _ in list(self.named_parameters(recurse=False)):
                delattr(self, name)
            # Otherwise transformers would initialise parameters that are no longer there.
            self._is_hf_initialized = True  # type: ignore[assignment]

        return init

    with contextlib.ExitStack() as stack:
        for cls in classes:
            stack.callback(setattr, cls, "__init__", cls.__init__)
            cls.__init__ = dropping(cls.__init__)  # type: ignore[method-assign]
        yield


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silences transformers' long report of unexpected (expert) tensors; the caller checks for missing ones."""
    with contextlib.ExitStack() as stack:
        stack.callback(transformers_logging.set_verbosity, transformers_logging.get_verbosity())
        if transformers_logging.is_progress_bar_enabled():
            stack.callback(transformers_logging.enable_progress_bar)
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
        yield
