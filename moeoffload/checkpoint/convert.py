"""How the stored tensors become the parameters of an experts module, for any choice of experts.

transformers holds a list of renamings and conversions per family (stack the experts' tensors, join gate and up,
transpose, interleave). The same list and the same operations are used here, on the asked experts' tensors only: all
operations that keep experts apart give the same bits for a subset as for the whole. One that mixes experts is refused
by name.

Sources: ``transformers.core_model_loading.convert_and_load_state_dict_in_model`` (the order of steps, the meaning of a
position in a list) and ``transformers.conversion_mapping`` (the lists).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    Interleave,
    MergeModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from moeoffload.checkpoint.layout import n_experts_of, per_expert_parameters
from moeoffload.checkpoint.model_config import first_line
from moeoffload.checkpoint.tensors import COMPUTE_DTYPES, StoredTensor, TensorIndex, TensorReader
from moeoffload.errors import ModelError

_PER_EXPERT_OPERATIONS = (Chunk, Concatenate, Interleave, Transpose)


@dataclass
class Recipe:
    """The stored tensors that give one parameter of an experts module (or several), and the conversion between them.

    ``targets`` are full parameter names; ``sources`` maps each pattern of the converter to its tensors in natural
    order: either one tensor per expert, or a single one whose first dimension is the expert. ``converter`` is None when
    a tensor is the parameter as it is. ``per_expert`` is False for a parameter that all experts share; it is taken
    whole.
    """

    targets: tuple[str, ...]
    converter: WeightConverter | None
    per_expert: bool
    sources: dict[str, list[StoredTensor]] = field(default_factory=dict)

    @property
    def expert_bytes(self) -> int:
        """Stored bytes of one expert, or of the whole when the experts share it."""
        total = sum(tensor.nbytes for tensors in self.sources.values() for tensor in tensors)
        if not self.per_expert:
            return total
        (first, *_) = self.sources.items()
        return total // (len(first[1]) if "*" in first[0] else first[1][0].shape[0])

    def read(self, reader: TensorReader, experts: Sequence[int]) -> dict[str, list[torch.Tensor]]:
        """The source tensors of ``experts`` by pattern, in their stored dtypes; only these experts' bytes are read."""
        if not self.per_expert:
            return {pattern: [reader.read(tensor) for tensor in tensors] for pattern, tensors in self.sources.items()}
        return {
            pattern: [reader.read(tensors[expert]) for expert in experts]
            if "*" in pattern
            else [reader.read_rows(tensors[0], experts)]
            for pattern, tensors in self.sources.items()
        }

    def convert(self, tensors: dict[str, list[torch.Tensor]], shapes: Any, config: Any) -> dict[str, torch.Tensor]:
        """Full parameter name -> tensor. ``shapes`` answers ``get_parameter(name)`` with the shape that is wanted.

        Raises ModelError naming the parameter when the tensors do not fit together or do not give the wanted shape.
        """
        if self.converter is None:
            ((tensor,),) = tensors.values()
            converted = {self.targets[0]: tensor}
        else:
            converter = copy.deepcopy(self.converter)
            converter.collected_tensors.update(tensors)
            try:
                converted = converter.convert(self.targets[0], model=shapes, config=config)
            except (RuntimeError, ValueError, IndexError) as error:
                raise ModelError(f"{self.targets[0]}: its stored tensors do not fit: {first_line(error)}") from error
        for target in self.targets:
            wanted = shapes.get_parameter(target).shape
            if target not in converted or converted[target].shape != wanted:
                found = tuple(converted[target].shape) if target in converted else "nothing"
                raise ModelError(f"{target}: the stored tensors give shape {found}, the model needs {tuple(wanted)}")
        return converted


class Shapes:
    """Stands in for the model where a conversion asks for a parameter's shape: here that of ``n_experts`` experts."""

    def __init__(self, module_name: str, module: nn.Module, n_experts: int):
        per_expert = per_expert_parameters(module)
        self._parameters = {}
        for name, parameter in module.named_parameters():
            shape = (n_experts, *parameter.shape[1:]) if name in per_expert else tuple(parameter.shape)
            self._parameters[f"{module_name}.{name}"] = torch.empty(shape, dtype=parameter.dtype, device="meta")

    def get_parameter(self, name: str) -> torch.Tensor:
        """A meta tensor with the shape of the parameter ``name``."""
        return self._parameters[name]


def make_recipes(model: nn.Module, experts: dict[str, nn.Module], index: TensorIndex) -> dict[str, list[Recipe]]:
    """For every experts module the recipes that give all its parameters from the tensors of ``index``.

    ``model`` is the whole model on the meta device. Raises ModelError naming the parameter when stored tensors are
    missing, have another shape or dtype than needed, or would have to be mixed across experts.
    """
    owners = {
        f"{name}.{parameter}": name for name, module in experts.items() for parameter, _ in module.named_parameters()
    }
    by_target = _match(model, experts, owners, index)
    recipes: dict[str, list[Recipe]] = {name: [] for name in experts}
    for recipe in by_target.values():
        recipes[owners[recipe.targets[0]]].append(recipe)
    for name, module in experts.items():
        _check_complete(name, module, recipes[name])
        for recipe in recipes[name]:
            _check_recipe(recipe, name, module, model.config)
    return recipes


def _match(
    model: nn.Module, experts: dict[str, nn.Module], owners: dict[str, str], index: TensorIndex
) -> dict[str, Recipe]:
    """Sort the stored tensors under the expert parameters that they become, as transformers does when it loads."""
    known = model.state_dict()
    prefix = model.base_model_prefix
    mapping = get_model_conversion_mapping(model)
    renamings = [step for step in mapping if isinstance(step, WeightRenaming)]
    converters = [step for step in mapping if isinstance(step, WeightConverter)]
    converter_of = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    recipes: dict[str, Recipe] = {}
    # Natural order (2 before 10) is what makes the position in a list the number of the expert.
    for tensor in sorted(index, key=lambda tensor: dot_natural_key(tensor.name)):
        renamed, pattern = rename_source_key(tensor.name, renamings, converters, prefix, known)
        if renamed not in known and tensor.name in known:
            renamed, pattern = rename_source_key(tensor.name, [], [], prefix, known)
        if renamed not in owners:
            continue
        converter = converter_of[pattern] if pattern is not None else None
        if renamed not in recipes:
            recipes[renamed] = _new_recipe(renamed, converter, experts[owners[renamed]], owners)
        recipe = recipes[renamed]
        if recipe.converter is not converter or (converter is None and recipe.sources):
            raise ModelError(f"{renamed}: is stored twice in different layouts, the second time as {tensor.name}")
        recipe.sources.setdefault(pattern or tensor.name, []).append(tensor)
    return recipes


def _new_recipe(target: str, converter: WeightConverter | None, module: nn.Module, owners: dict[str, str]) -> Recipe:
    patterns = converter.target_patterns if converter is not None else [target]
    targets = tuple(target.replace(patterns[0], pattern) for pattern in patterns)
    strangers = [name for name in targets if owners.get(name) != owners[target]]
    if strangers:
        raise ModelError(f"{target}: is stored together with {strangers[0]}, outside of its module; not supported")
    parameters = [name.removeprefix(f"{owners[target]}.") for name in targets]
    return Recipe(targets, converter, per_expert=all(name in per_expert_parameters(module) for name in parameters))


def _check_complete(name: str, module: nn.Module, recipes: Iterable[Recipe]) -> None:
    covered = {target for recipe in recipes for target in recipe.targets}
    for parameter, _ in module.named_parameters():
        if f"{name}.{parameter}" not in covered:
            raise ModelError(f"{name}.{parameter}: the checkpoint has no tensors for it")
    if any(True for _ in module.buffers()):
        raise ModelError(f"{name}: holds buffers beside its parameters, which is not supported")


def _check_recipe(recipe: Recipe, name: str, module: nn.Module, config: Any) -> None:
    target, n_experts = recipe.targets[0], n_experts_of(module)
    operations = recipe.converter.operations if recipe.converter is not None else []
    missing = set(recipe.converter.source_patterns if recipe.converter is not None else ()) - recipe.sources.keys()
    if missing:
        raise ModelError(f"{target}: the checkpoint has no tensors like {min(missing)}")
    for pattern, tensors in recipe.sources.items():
        for tensor in tensors:
            if tensor.torch_dtype not in COMPUTE_DTYPES:
                raise ModelError(
                    f"{target}: {tensor.name} is stored as {tensor.dtype}; "
                    "needed are unquantised weights (bfloat16, float16 or float32)"
                )
        if recipe.per_expert:
            _check_experts(target, pattern, tensors, n_experts)
    if recipe.per_expert:
        _check_operations(target, operations)
    # One expert without memory shows whether shapes fit; all experts have the same ones.
    sample = {
        pattern: [
            torch.empty(
                (1, *tensor.shape[1:]) if recipe.per_expert and "*" not in pattern else tensor.shape, device="meta"
            )
            for tensor in (tensors[:1] if recipe.per_expert else tensors)
        ]
        for pattern, tensors in recipe.sources.items()
    }
    recipe.convert(sample, Shapes(name, module, 1), config)


def _check_experts(target: str, pattern: str, tensors: Sequence[StoredTensor], n_experts: int) -> None:
    shape = tensors[0].shape
    if "*" not in pattern:
        if len(tensors) != 1 or shape[:1] != (n_experts,):
            raise ModelError(f"{target}: {tensors[0].name} has shape {shape}, its first dimension must be {n_experts}")
        return
    if len(tensors) != n_experts:
        raise ModelError(
            f"{target}: the checkpoint has tensors like {tensors[0].name} for {len(tensors)} of {n_experts} experts"
        )
    for tensor in tensors:
        if tensor.shape != shape:
            raise ModelError(f"{target}: {tensor.name} has shape {tensor.shape}, {tensors[0].name} has {shape}")


def _check_operations(target: str, operations: Sequence[Any]) -> None:
    for position, operation in enumerate(operations):
        dims = [getattr(operation, dim) for dim in ("dim", "dim0", "dim1") if hasattr(operation, dim)]
        if position == 0 and isinstance(operation, MergeModulelist) and dims == [0]:
            continue
        if not isinstance(operation, _PER_EXPERT_OPERATIONS) or 0 in dims:
            raise ModelError(f"{target}: its conversion step {operation!r} mixes experts; not supported")
