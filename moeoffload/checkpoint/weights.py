"""Presents a checkpoint's weights with the names and shapes of an unquantised one, however they are stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import EllipsisType
from typing import Any, Final

import torch

from moeoffload.checkpoint.model_config import quantisation
from moeoffload.checkpoint.tensors import DTYPES, StoredTensor, TensorIndex, TensorReader
from moeoffload.errors import ModelError
from moeoffload.formats import PackedWeights
from moeoffload.formats.file_format import SHARED, FileFormat, Packing

_MAX_GROUP: Final = 1 << 20  # weights or rows that share a scale: kernels count them in 64 bits


@dataclass(frozen=True)
class StoredWeight:
    """One weight of a checkpoint.

    Attributes:
        name: its name in an unquantised checkpoint.
        shape: its shape there.
        parts: the stored tensors by role; ``weight`` is the weight itself, or its codes.
        packing: how the parts become packed rows; None if ``weight`` is the weight itself.
    """

    name: str
    shape: tuple[int, ...]
    parts: Mapping[str, StoredTensor]
    packing: Packing | None = None

    @property
    def nbytes(self) -> int:
        """Stored bytes of all parts."""
        return sum(tensor.nbytes for tensor in self.parts.values())

    @property
    def plain(self) -> StoredTensor:
        """The stored tensor of a weight that is not packed."""
        return self.parts["weight"]

    def read_parts(
        self, reader: TensorReader, expert: int = 0, into: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        """Reads the parts of one matrix: that of ``expert`` if one weight holds all experts.

        The same thread's next call overwrites them, except ``weight`` if it was read ``into`` a tensor. Raises
        ModelError when bytes are missing.
        """
        row = None if len(self.shape) == 2 else expert
        return {
            role: reader.read_part(tensor, role, row, into if role == "weight" else None)
            for role, tensor in self.parts.items()
        }

    def unpack(self, reader: TensorReader, dtype: torch.dtype) -> torch.Tensor:
        """Reads the whole weight: packed ones as ``dtype``, others in their stored dtype.

        Raises ModelError when bytes are missing.
        """
        if self.packing is None:
            return reader.read(self.plain)
        matrices = []
        for expert in range(1 if len(self.shape) == 2 else self.shape[0]):
            matrix = self.read_packed(reader, expert).unpack(dtype)[0]
            matrices.append(matrix.t() if self.packing.is_transposed else matrix)
        return (matrices[0] if len(self.shape) == 2 else torch.stack(matrices)).contiguous()

    def read_packed(self, reader: TensorReader, expert: int = 0) -> PackedWeights:
        """Reads one matrix of a packed weight, (1, out, in). Raises ModelError when bytes are missing."""
        assert self.packing is not None
        n_out, n_in = self.packing.rows_first
        packed = PackedWeights.empty(self.packing.packed, 1, n_out, n_in, torch.device("cpu"))
        for name, values in self.sections(self.read_parts(reader, expert)).items():
            if name == SHARED and packed.scales is not None:
                packed.scales[0] = values
            else:
                packed.section(name)[0] = values
        return packed

    def sections(self, parts: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Applies `Packing.sections` to the parts of a matrix. Raises ModelError when their values do not fit."""
        assert self.packing is not None
        try:
            return self.packing.sections(parts)
        except ValueError as error:
            raise ModelError(f"{self.name}: {error}") from error


@dataclass(frozen=True)
class DenseTensor:
    """A tensor that is read when transformers accesses its values as ``tensor[...]``, like those of its own slices.

    Attributes:
        values: reads the values, in the compute dtype or the stored one.
        stored: the stored weight if it is the parameter without conversion, else None.
    """

    values: Callable[[TensorReader], torch.Tensor]
    stored: StoredWeight | None

    def __getitem__(self, everything: EllipsisType) -> torch.Tensor:
        with TensorReader() as reader:
            return self.values(reader)

    def packed(self) -> PackedWeights | None:
        """Returns the stored matrix, (1, out, in), if it is packed as (out, in), else None. Raises ModelError when
        bytes are missing."""
        packing = self.stored.packing if self.stored is not None else None
        if self.stored is None or packing is None or packing.is_transposed or len(packing.shape) != 2:
            return None
        with TensorReader() as reader:
            return self.stored.read_packed(reader)


Dense = Callable[[torch.dtype], Mapping[str, DenseTensor]]
"""Takes the compute dtype; returns everything but the routed experts, by names that transformers knows."""


def as_dense(weights: list[StoredWeight]) -> Dense:
    """Returns the `Dense` of the stored weights of a transformers folder."""
    return lambda dtype: {each.name: DenseTensor(partial(each.unpack, dtype=dtype), each) for each in weights}


def stored_weights(index: TensorIndex, values: dict[str, Any], where: Path) -> list[StoredWeight]:
    """Returns every weight in ``index``; ``values`` are those of the config.json in ``where``.

    Raises ModelError when the quantisation that it states is not supported, and naming the tensor when parts of a
    weight are missing or do not fit.
    """
    settings, formats = quantisation(values, where)
    packings: dict[object, Packing] = {}
    taken: set[str] = set()
    found: list[StoredWeight] = []
    for tensor in index.values():
        dtype = DTYPES.get(tensor.dtype)
        form = next((each for each in formats if tensor.name.endswith(each.main) and dtype in each.dtypes), None)
        if form is None:
            continue
        parts = _parts(tensor, form, index)
        key = (form.main, tuple((role, part.dtype, part.shape) for role, part in parts.items()))
        if key not in packings:
            packings[key] = _pack(tensor, form, parts, settings)
        packing = packings[key]
        name = tensor.name.removesuffix(form.main) + form.plain
        found.append(StoredWeight(name, packing.shape, parts, packing))
        taken.update(part.name for part in parts.values())
    plain = (tensor for tensor in index.values() if tensor.name not in taken)
    return found + [StoredWeight(tensor.name, tensor.shape, {"weight": tensor}) for tensor in plain]


def _parts(main: StoredTensor, form: FileFormat, index: TensorIndex) -> dict[str, StoredTensor]:
    base = main.name.removesuffix(form.main)
    parts = {"weight": main}
    for role, endings in form.parts.items():
        name = next((base + ending for ending in endings if base + ending in index), None)
        if name is not None:
            parts[role] = index[name]
        elif role not in form.optional:
            raise ModelError(f"{main.name}: is stored as {main.dtype}, and has no {role} ({base + endings[0]})")
    return parts


def _pack(
    main: StoredTensor, form: FileFormat, parts: Mapping[str, StoredTensor], settings: Mapping[str, Any]
) -> Packing:
    on_meta = {role: torch.empty(part.shape, dtype=part.torch_dtype, device="meta") for role, part in parts.items()}
    if len(main.shape) < 2 or not all(main.shape):
        raise ModelError(f"{main.name}: has shape {main.shape}, needed is one matrix, or one for each expert")
    try:
        packing = form.pack(on_meta, settings)
    except (ValueError, IndexError) as error:
        raise ModelError(f"{main.name}: {error}") from error
    if len(packing.shape) not in (2, 3):
        raise ModelError(f"{main.name}: has shape {main.shape}, needed is one matrix, or one for each expert")
    if max(packing.packed.group, packing.packed.shared_rows) > _MAX_GROUP:
        raise ModelError(f"{main.name}: its groups are larger than {_MAX_GROUP}")
    return packing
