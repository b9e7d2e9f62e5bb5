"""Gives a GGUF file's tensors transformers' names: experts stay packed rows, dense tensors are unpacked one by one.

llama.cpp stores the experts of a layer in three matrices (or two, with gate and up joined) and their biases, under the
same names for every family and with rows in the order in which the model computes them. So one rule covers all
families: the flags of the experts class determine the conversion. Dense tensors are found by the names that the gguf
package lists for each family, or by transformers' own conversions where llama.cpp stores changed weights.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, Final

import torch
from torch import nn
from transformers.core_model_loading import (
    Concatenate,
    ConversionOps,
    Interleave,
    Transpose,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    rename_source_key,
)
from transformers.integrations.gguf.gguf_conversion_mapping import GGUF_ARCHS

from moeoffload.checkpoint.gguf_config import FAMILIES
from moeoffload.checkpoint.gguf_file import GgufFile
from moeoffload.checkpoint.tensors import DTYPES, StoredTensor, TensorReader
from moeoffload.checkpoint.weights import DenseTensor, StoredWeight
from moeoffload.errors import ModelError
from moeoffload.formats import PLAIN
from moeoffload.formats.file_format import Packing, as_bytes
from moeoffload.formats.gguf import BLOCK_TYPES, split_rows
from moeoffload.huge_pages import empty_weights

_EXPERTS: Final = re.compile(r"blk\.(\d+)\.(ffn_(?:gate|up|gate_up|down)_exps\.(?:weight|bias))")
_OF_EXPERTS: Final = re.compile(r"blk\.(\d+)\.ffn_\w*_(ch)?exps\.")
_LAYER: Final = re.compile(r"\.(\d+)\.")
_PLAIN: Final = ("F32", "F16", "BF16")
_UNPACKED: Final = ("Q4_1", "Q5_1")
"""Types without kernels, whose experts are unpacked to the compute dtype when they are read. llama.cpp uses Q5_1 in
place of Q5_K for rows whose length is not a multiple of 256."""
_PIECE_BYTES: Final = 1 << 18  # bytes of blocks unpacked at a time: intermediate results stay in a core's cache
_BIASES: Final = {"gate_up_proj": "gate_up_proj_bias", "up_proj": "up_proj_bias", "down_proj": "down_proj_bias"}


def expert_weights(gguf: GgufFile, experts: Mapping[str, nn.Module]) -> list[StoredWeight]:
    """Returns the stored weights of the experts modules, each named after its module: ``{module}.ffn_up_exps.weight``.

    Raises ModelError for a type that experts are not computed from, and for unsupported tensors of experts.
    """
    modules = {_layer_of(name): name for name in experts}
    found = []
    for tensor in gguf.tensors:
        layer = _OF_EXPERTS.match(tensor.name)
        if layer is None or int(layer[1]) not in modules:
            continue
        name = _EXPERTS.fullmatch(tensor.name)
        if name is None:
            raise ModelError(f"{tensor.name}: is a tensor of routed experts that is not supported")
        module = modules[int(layer[1])]
        found.append(_packed(tensor, f"{module}.{name[2]}", next(experts[module].parameters()).dtype))
    return found


def expert_mapping(experts: Mapping[str, nn.Module]) -> list[WeightTransform]:
    """Returns transformers' conversion steps from `expert_weights` to the parameters of the modules."""
    steps: dict[tuple[str, ...], WeightTransform] = {}
    for module in experts.values():
        for parameter, _ in module.named_parameters(recurse=False):
            for step in _steps(module, parameter):
                steps.setdefault((*step.source_patterns, *step.target_patterns), step)
    return list(steps.values())


def _steps(module: Any, parameter: str) -> Iterator[WeightTransform]:
    """Yields the conversions to one parameter of an experts module: one for each way to store its weights."""
    matrix = parameter.removesuffix("_bias")
    if matrix not in _BIASES:
        return  # reported as missing later, when the module is checked for completeness
    kind = "bias" if parameter.endswith("_bias") else "weight"
    turn: list[ConversionOps] = [Transpose(1, 2)] if module.is_transposed and kind == "weight" else []
    target = rf".experts.{parameter}"
    if matrix == "gate_up_proj":
        mix: list[ConversionOps] = [] if module.is_concatenated else [Interleave(1, inverse=True)]
        pair = [rf"\.experts\.ffn_{which}_exps\.{kind}$" for which in ("gate", "up")]
        yield WeightConverter(pair, target, [Concatenate(1), *mix, *turn])
        yield _convert(rf"\.experts\.ffn_gate_up_exps\.{kind}$", target, [*mix, *turn])
    else:
        which = matrix.removesuffix("_proj")
        yield _convert(rf"\.experts\.ffn_{which}_exps\.{kind}$", target, turn)


def _convert(source: str, target: str, operations: Sequence[ConversionOps]) -> WeightTransform:
    return WeightConverter(source, target, list(operations)) if operations else WeightRenaming(source, target)


def _layer_of(module_name: str) -> int:
    """Returns the decoder layer of an experts module; llama.cpp numbers its blocks as transformers does."""
    numbers = _LAYER.findall(module_name)
    if len(numbers) != 1:
        raise ModelError(f"{module_name}: its layer in a GGUF file is not known")
    return int(numbers[0])


def _packed(tensor: StoredTensor, name: str, dtype: torch.dtype) -> StoredWeight:
    if tensor.dtype in DTYPES:
        return StoredWeight(name, tensor.shape, {"weight": tensor})
    if tensor.dtype not in BLOCK_TYPES and tensor.dtype not in _UNPACKED:
        known = ", ".join((*_PLAIN, *BLOCK_TYPES, *_UNPACKED))
        raise ModelError(f"{tensor.name}: is of type {tensor.dtype}; experts are computed from {known}")
    return StoredWeight(name, tensor.shape, {"weight": _as_bytes(tensor)}, _packing(tensor.dtype, tensor.shape, dtype))


@cache
def _packing(type_name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Packing:
    if type_name in _UNPACKED:
        to = dtype if dtype in PLAIN else torch.float32
        return Packing(
            PLAIN[to], shape, lambda parts: {"codes": as_bytes(_values(parts["weight"], type_name, shape[-1], to))}
        )
    kind = BLOCK_TYPES[type_name]
    return Packing(kind.format, shape, lambda parts: split_rows(parts["weight"], kind))


def _as_bytes(tensor: StoredTensor) -> StoredTensor:
    """Returns the tensor as uint8: the bytes of its rows."""
    n_rows = math.prod(tensor.shape[:-1])
    return replace(tensor, dtype="U8", shape=(*tensor.shape[:-1], tensor.nbytes // n_rows))


def dense_tensors(gguf: GgufFile, config: Any, shapes: Mapping[str, Any], dtype: torch.dtype) -> dict[str, DenseTensor]:
    """Returns the dense parameters in the file by name; ``shapes`` has the shapes of all the model's dense parameters
    and buffers."""
    name = gguf.architecture
    sources = _by_list(name, config, shapes) if name in FAMILIES else _by_conversions(gguf, config, shapes)
    stored = {tensor.name: tensor for tensor in gguf.tensors}
    found = {}
    for target, (source, converter) in sources.items():
        if source in stored:
            tensor, shape = stored[source], tuple(shapes[target])
            is_same = converter is None and tensor.dtype in BLOCK_TYPES and tensor.shape == shape
            values = partial(_unpack, stored=tensor, name=target, shape=shape, dtype=dtype, converter=converter)
            found[target] = DenseTensor(values, _packed(tensor, target, dtype) if is_same else None)
    return found


_Sources = dict[str, tuple[str, WeightConverter | None]]
"""For each parameter the name of its tensor, and the converter or None."""


def _by_list(architecture: str, config: Any, shapes: Mapping[str, Any]) -> _Sources:
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    number = next(number for number, name in MODEL_ARCH_NAMES.items() if name == architecture)
    names = get_tensor_name_map(number, config.num_hidden_layers)
    found: _Sources = {}
    for target in shapes:
        # The bias on the experts' scores is not a module in transformers, but the gguf package names it like one.
        spelled = target.replace("score_correction_bias", "score_correction.bias")
        known = names.get_name(spelled, try_suffixes=(".weight", ".bias"))
        if known is not None:
            is_whole = known.endswith((".weight", ".bias"))
            found[target] = (known if is_whole else f"{known}.weight", None)
    return found


def _by_conversions(gguf: GgufFile, config: Any, shapes: Mapping[str, Any]) -> _Sources:
    mapping = GGUF_ARCHS[gguf.architecture](config)
    renamings = [step for step in mapping if isinstance(step, WeightRenaming)]
    converters = [step for step in mapping if isinstance(step, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    found: _Sources = {}
    for tensor in gguf.tensors:
        target, pattern = rename_source_key(tensor.name, renamings, converters)
        if target in shapes:
            found[target] = (tensor.name, by_pattern[pattern] if pattern is not None else None)
    return found


def _unpack(
    reader: TensorReader,
    stored: StoredTensor,
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    converter: WeightConverter | None,
) -> torch.Tensor:
    """Reads a tensor of any type as the parameter ``name`` of ``shape`` and ``dtype``; ``converter`` reverses
    llama.cpp's change of the weights. Raises ModelError: it has another size, or bytes are missing."""
    unpacked = dtype if converter is None else torch.float32
    if stored.dtype in DTYPES:
        values = reader.read(stored).to(unpacked)
    else:
        rows = reader.read(_as_bytes(stored)).flatten(0, -2)
        values = _values(rows, stored.dtype, stored.shape[-1], unpacked).reshape(stored.shape)
    if converter is not None:
        converter = copy.deepcopy(converter)
        converter.collected_tensors[converter.source_patterns[0]] = [values]
        values = converter.convert(name)[name]
    if values.numel() != math.prod(shape):
        raise ModelError(f"{stored.name}: has shape {tuple(values.shape)}, the model needs {shape}")
    return values.reshape(shape).to(dtype)


def _values(rows: torch.Tensor, type_name: str, n_in: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns the weights in rows of blocks, (n, bytes) uint8, as (n, n_in) of ``dtype``."""
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    result = empty_weights((rows.shape[0], n_in), dtype)
    step = max(1, _PIECE_BYTES // max(1, rows.shape[1]))
    kind = GGMLQuantizationType[type_name]
    for start in range(0, rows.shape[0], step):
        piece = dequantize(rows[start : start + step].numpy(), kind)
        result[start : start + step] = torch.from_numpy(piece)
    return result
