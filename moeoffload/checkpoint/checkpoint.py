"""A checkpoint as hosts and expert servers use it: describes its MoE layers and builds any subset of their experts."""

from __future__ import annotations

import copy
import hashlib
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from moeoffload.checkpoint.convert import Plans, Recipe, Shapes, plan_rows
from moeoffload.checkpoint.copy_buffers import CopyBuffers
from moeoffload.checkpoint.digest import digest_checkpoint, stamp_of
from moeoffload.checkpoint.draft_head import draft_head_of
from moeoffload.checkpoint.gguf import open_gguf
from moeoffload.checkpoint.gguf_file import is_gguf
from moeoffload.checkpoint.layout import (
    ExpertLayer,
    build_meta_model,
    dense_bytes_of,
    find_experts,
    intermediate_of,
    n_experts_of,
    per_expert_parameters,
    row_width_of,
    top_k_of,
)
from moeoffload.checkpoint.locate import locate
from moeoffload.checkpoint.model_config import CONFIG_FILE
from moeoffload.checkpoint.packed_rows import Piece
from moeoffload.checkpoint.quantised import quantised_experts, quantised_pieces, refuse_packed
from moeoffload.checkpoint.source import Source, open_folder
from moeoffload.checkpoint.tensors import COMPUTE_DTYPES, INDEX_FILE, TensorReader
from moeoffload.checkpoint.weights import DenseTensor
from moeoffload.errors import ModelError
from moeoffload.formats import PLAIN, PackedWeights
from moeoffload.formats.quantise import FORMATS
from moeoffload.formats.tiles import multiplies_tiles
from moeoffload.huge_pages import empty_weights
from moeoffload.payload import PayloadDtype

# Experts are converted in groups, which needs only a few times this many bytes beside the finished experts.
_GROUP_BYTES = 16 << 20
_CPU = torch.device("cpu")
_MOST_THREADS = 8
_TURNS = 4  # of each thread, so that a slow one does not delay the others
_NAMES = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32", torch.float64: "f64"}


class Checkpoint:
    """A Mixture-of-Experts model on disk. Created by :meth:`open`; holds no weights.

    Attributes:
        path: the local folder, or the GGUF file.
        folder: the folder with tokenizer and generation config; None if the GGUF file itself has them.
        config_text: the config.json that must be sent to a server that has only the GGUF file; else empty.
        config: the transformers config as ``AutoConfig`` reads it (for multimodal models the whole one).
        model_type: its ``model_type``.
        model_class: the transformers class whose ``named_modules()`` has the layers' names.
        dtype: compute dtype: the one given to ``open``, else the config's, else the source's own, else that of most
            stored bytes, else float32.
        hidden_size: elements of a routed expert's input and output row. It is the text model's ``hidden_size`` except
            in the few families whose experts work on a narrower, projected row.
        top_k: routed experts per row.
        layers: the MoE layers in model order.
        dense_bytes: bytes of everything but the routed experts, in the compute dtype.
        expert_format: the format that experts are quantised to while they are read, see `open`.
        stamp: `stamp_of` the files at opening; it changes when one of them changes.
    """

    def __init__(
        self, source: Source, dtype: torch.dtype, quantised: str | None = None, model: nn.Module | None = None
    ):
        model = build_meta_model(source.config, dtype) if model is None else model
        experts = find_experts(model)
        self.path = source.path
        self.folder = source.folder
        self.config_text = source.config_text
        self.config = source.config
        self.model_type = self.config.model_type
        self.model_class = type(model)
        self.dtype = dtype
        self.hidden_size = _only({row_width_of(module) for module in experts.values()}, "row widths", self.model_type)
        self.top_k = _only({top_k_of(model, name) for name in experts}, "top_k values", self.model_type)
        self.dense_bytes = dense_bytes_of(model, experts)
        self._source = source
        self._files = sorted({tensor.file for tensor in source.index.values()})
        if source.path.is_dir():
            self._files += [source.path / name for name in (CONFIG_FILE, INDEX_FILE)]
        self.stamp = stamp_of(self._files)
        # The experts modules stay on the meta device as moulds for subsets; the rest of the model is dropped.
        self._moulds = experts
        self._recipes, self._dense = source.sort(model, experts)
        self._plans: Plans = {}
        self._model_config = model.config
        self.expert_format = quantised
        if quantised is not None:
            refuse_packed(self.path, self._recipes, quantised)
        self.layers = tuple(self._describe(number, name) for number, name in enumerate(experts))

    @classmethod
    def open(
        cls,
        model: str | Path,
        *,
        dtype: torch.dtype | None = None,
        revision: str | None = None,
        expert_format: str | None = None,
        dense: Path | None = None,
        config_text: str = "",
    ) -> Checkpoint:
        """Opens a folder in the transformers format, a hub id, or a GGUF file; reads headers only.

        Args:
            model: folder, hub id such as ``"org/name"``, or a file (any part) that ends in ``.gguf``.
            dtype: compute dtype (float32, float16, bfloat16 or float64); None: the checkpoint's.
            revision: branch, tag or commit of a hub id.
            expert_format: name in `formats.quantise.FORMATS` of the format that experts are quantised to while they are
                read; None leaves them as they are stored.
            dense: folder with the config and the dense tensors of the model in a GGUF file.
            config_text: that config alone, if only experts are needed.

        Raises:
            ModelError: no such model, damaged or missing files, weights of an unknown format, not a Mixture-of-Experts
                model, a family whose experts transformers does not route through its experts interface, or ``dense`` of
                another model. The message is one line.
        """
        path = locate(model, revision)
        if is_gguf(path):
            source = open_gguf(path, dense, config_text)
        elif dense is not None:
            raise ModelError(f"--dense: goes with a GGUF file, {path} has dense tensors itself")
        else:
            source = open_folder(path)
        return cls(source, _compute_dtype(dtype, source), expert_format)

    @cached_property
    def digest(self) -> str:
        """Hex SHA-256 of config, tensor names, dtypes and shapes, and a sample of every tensor's bytes.

        Equal for copies, other places and other shardings of the same checkpoint, and independent of the compute dtype.
        Differs for each ``expert_format``.
        """
        stored = digest_checkpoint(self._source.values, self._source.index)
        if self.expert_format is None:
            return stored
        return hashlib.sha256(f"{stored} {self.expert_format}".encode()).hexdigest()

    @property
    def dtype_label(self) -> str:
        """The name of the compute dtype in control messages: f32, f16 or bf16."""
        return PayloadDtype.from_torch(self.dtype).label

    @property
    def is_current(self) -> bool:
        """Whether the files are unchanged since they were opened."""
        return stamp_of(self._files) == self.stamp

    @property
    def experts_classes(self) -> tuple[type[nn.Module], ...]:
        """The classes of the experts modules, each once."""
        return tuple(dict.fromkeys(type(mould) for mould in self._moulds.values()))

    def dense_tensors(self) -> Mapping[str, DenseTensor]:
        """Returns all tensors but the routed experts by name; each is read (and unpacked) when it is accessed."""
        return self._dense(self.dtype)

    def draft_head(self) -> Checkpoint:
        """Returns the checkpoint's own multi-token-prediction layer as a checkpoint of one layer.
        Raises ModelError: it has none, or none that can be used."""
        head, source = draft_head_of(self._source, self.dtype)
        return Checkpoint(source, self.dtype, self.expert_format, head)

    def build_experts(
        self,
        layer: int,
        experts: Sequence[int],
        device: torch.device,
        *,
        in_tiles: bool = False,
        buffers: CopyBuffers | None = None,
    ) -> nn.Module:
        """Builds the model's own experts module of MoE layer ``layer`` with only ``experts``, in this order.

        Parameters have the first dimension ``len(experts)``, the compute dtype and no gradient; ``num_experts`` is
        ``len(experts)``; the module is in eval mode with its own config whose experts implementation is ``eager``, and
        its ``compute_dtype`` is the compute dtype. Packed matrices are tuples of `PackedWeights`, (n_experts, out, in),
        instead of parameters: one, or two whose rows follow each other; with ``in_tiles`` they are read straight into
        tiles if the CPU multiplies tiles. Matrices that are not converted go to a GPU through ``buffers``. Needs at
        most about 150 MiB of memory beside the result (more if a single expert is larger).
        Raises ModelError: no such layer or expert, or the checkpoint cannot be read.
        """
        if not 0 <= layer < len(self.layers):
            raise ModelError(f"layer {layer}: this model has MoE layers 0..{len(self.layers) - 1}")
        about = self.layers[layer]
        wrong = [expert for expert in experts if not 0 <= expert < about.n_experts]
        if wrong or not experts:
            asked = f"expert {wrong[0]}" if wrong else "no expert"
            raise ModelError(f"layer {layer}: {asked} was asked for, there are 0..{about.n_experts - 1}")
        if self.expert_format is not None:
            pieces = self._pieces(about.module_name)
            return quantised_experts(
                self._cast(about, len(experts), device, pieces, in_tiles),
                lambda some: self._read(about, some, _CPU),
                [experts[group] for group in _groups(len(experts), about.n_weights * self.dtype.itemsize)],
            )
        return self._read(about, experts, device, in_tiles, buffers)

    def _read(
        self,
        about: ExpertLayer,
        experts: Sequence[int],
        device: torch.device,
        in_tiles: bool = False,
        buffers: CopyBuffers | None = None,
    ) -> nn.Module:
        """Reads experts in the formats in which they are stored."""
        if buffers is not None and not buffers.serve(device):
            buffers = None
        # Inference mode off: other threads could not write to inference tensors.
        with TensorReader() as reader, torch.inference_mode(False), torch.no_grad():
            module = self._cast(about, len(experts), device, self._stored_pieces(about.module_name), in_tiles)
            try:
                for recipe in self._recipes[about.module_name]:
                    self._fill(module, about, recipe, experts, reader, buffers)
            finally:
                if buffers is not None:
                    buffers.settle()
        return module

    def empty_experts(self, layer: int, n_experts: int, device: torch.device, *, in_tiles: bool = False) -> nn.Module:
        """As `build_experts`, for any ``n_experts`` experts and with undefined values."""
        about = self.layers[layer]
        return self._cast(about, n_experts, device, self._pieces(about.module_name), in_tiles)

    def _describe(self, number: int, name: str) -> ExpertLayer:
        mould = self._moulds[name]
        sizes = {leaf: shape[1:].numel() for leaf, shape in per_expert_parameters(mould).items()}
        pieces = self._pieces(name)
        packed = {leaf: sum(piece.nbytes for piece in each) for leaf, each in pieces.items()}
        n_bytes = sum(packed.get(leaf, size * self.dtype.itemsize) for leaf, size in sizes.items())
        formats = sorted({piece.form.name for each in pieces.values() for piece in each}) or [_NAMES[self.dtype]]
        return ExpertLayer(
            number, name, n_experts_of(mould), n_bytes, sum(sizes.values()), intermediate_of(mould), "+".join(formats)
        )

    def _pieces(self, module_name: str) -> dict[str, tuple[Piece, ...]]:
        """Returns the matrices of an experts module that are packed in memory, by parameter name."""
        if self.expert_format is not None:
            return quantised_pieces(self._moulds[module_name], FORMATS[self.expert_format])
        return self._stored_pieces(module_name)

    def _stored_pieces(self, module_name: str) -> dict[str, tuple[Piece, ...]]:
        return {name: pieces for recipe in self._recipes[module_name] for name, pieces in recipe.pieces.items()}

    def _cast(
        self,
        layer: ExpertLayer,
        n_experts: int,
        device: torch.device,
        packed: dict[str, tuple[Piece, ...]],
        in_tiles: bool,
    ) -> nn.Module:
        mould = self._moulds[layer.module_name]
        module: Any = copy.deepcopy(mould)
        # Calls must not enter the experts implementation that this process may have registered.
        module.config._experts_implementation = "eager"
        module.num_experts = n_experts
        module.compute_dtype = self.dtype
        shapes = Shapes("", mould, n_experts)
        for name, _ in mould.named_parameters():
            if name in packed:
                delattr(module, name)
                pieces = packed[name]
                tiled = in_tiles and device.type == "cpu"
                tiled = tiled and multiplies_tiles(((each.form, each.n_out, each.n_in) for each in pieces), self.dtype)
                setattr(module, name, tuple(each.empty(n_experts, device, in_tiles=tiled) for each in pieces))
                continue
            owner, _, leaf = name.rpartition(".")
            empty = empty_weights(shapes.get_parameter(f".{name}").shape, self.dtype, device)
            setattr(module.get_submodule(owner), leaf, nn.Parameter(empty, requires_grad=False))
        return module.eval()

    def _fill(
        self,
        module: nn.Module,
        layer: ExpertLayer,
        recipe: Recipe,
        experts: Sequence[int],
        reader: TensorReader,
        buffers: CopyBuffers | None,
    ) -> None:
        rooms = self._rooms(module, layer, recipe)
        if rooms:
            _fill_rows(rooms, recipe, experts, reader, buffers)
            return
        for group in _groups(len(experts), recipe.expert_bytes) if recipe.per_expert else [slice(0, len(experts))]:
            chosen = experts[group]
            shapes = Shapes(layer.module_name, self._moulds[layer.module_name], len(chosen))
            converted = recipe.convert(recipe.read(reader, chosen), shapes, self._model_config)
            for target, values in converted.items():
                parameter = module.get_parameter(target.removeprefix(f"{layer.module_name}."))
                (parameter[group] if recipe.per_expert else parameter).copy_(values)

    def _rooms(self, module: nn.Module, layer: ExpertLayer, recipe: Recipe) -> list[tuple[Piece, PackedWeights]]:
        """Returns the destinations of rows of packed matrices, or of plain ones that need no conversion; empty if the
        recipe's matrices must be converted."""
        if recipe.pieces:
            packed = [(pieces, getattr(module, name)) for name, pieces in recipe.pieces.items()]
            return [pair for pieces, weights in packed for pair in zip(pieces, weights, strict=True)]
        mould: Any = self._moulds[layer.module_name]
        if not recipe.per_expert or mould.is_transposed:
            return []
        plain = plan_rows(recipe, layer.module_name, mould, self._model_config, self._plans, must=False)
        if any(len(pieces) != 1 or pieces[0].form != PLAIN.get(self.dtype) for pieces in plain.values()):
            return []
        bytes_of = {name: module.get_parameter(name).data.view(torch.uint8) for name in plain}
        return [(each, PackedWeights(each.form, each.n_in, bytes_of[name])) for name, (each,) in plain.items()]


def _fill_rows(
    rooms: Sequence[tuple[Piece, PackedWeights]],
    recipe: Recipe,
    experts: Sequence[int],
    reader: TensorReader,
    buffers: CopyBuffers | None,
) -> None:
    """Fills in several experts in parallel: reading and copying do not hold the interpreter lock.

    Each thread takes neighbours: two threads that touch the same new huge page would both fill one with zeros.
    """
    pieces, outs = [piece for piece, _ in rooms], [out for _, out in rooms]

    def fill(places: Sequence[PackedWeights], some: Sequence[int], slots: range) -> None:
        for slot in slots:
            weights = [*recipe.weights_of(some[slot]).values()]
            for piece, place in zip(pieces, places, strict=True):
                piece.fill(place, slot, reader, weights, some[slot])

    n_threads = min(_MOST_THREADS, len(experts), os.cpu_count() or 1)
    with ThreadPoolExecutor(n_threads) as pool:
        for places, some in [(outs, experts)] if buffers is None else buffers.in_parts(outs, experts):
            slots, step = range(len(some)), -(-len(some) // (_TURNS * n_threads))
            for _ in pool.map(partial(fill, places, some), (slots[at : at + step] for at in slots[::step])):
                pass


def _groups(n_experts: int, expert_bytes: int) -> list[slice]:
    step = max(1, _GROUP_BYTES // max(1, expert_bytes))
    return [slice(start, start + step) for start in range(0, n_experts, step)]


def _only(values: set[int], what: str, model_type: str) -> int:
    if len(values) > 1:
        raise ModelError(f"{model_type}: its MoE layers have different {what} ({sorted(values)}); not supported")
    (value,) = values
    return value


def _compute_dtype(given: torch.dtype | None, source: Source) -> torch.dtype:
    config = source.config
    stated = given or config.dtype or config.get_text_config().dtype
    stated = stated or source.dtype or source.index.main_dtype() or torch.float32
    dtype = getattr(torch, stated, stated) if isinstance(stated, str) else stated
    if dtype not in COMPUTE_DTYPES:
        allowed = ", ".join(str(allowed).removeprefix("torch.") for allowed in COMPUTE_DTYPES)
        raise ModelError(f"compute dtype {dtype}: must be one of {allowed}")
    return dtype
