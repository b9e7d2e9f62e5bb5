"""Converts stored tensors to the parameters of an experts module, for any subset of experts.

transformers has a list of renamings and conversions per family (stack the experts' tensors, join gate and up,
transpose, interleave). This module applies the same list and operations to the requested experts' tensors only:
operations that keep experts apart give the same bits for a subset as for the whole. An operation that mixes experts is
refused by name.

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
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, get_model_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    Interleave,
    MergeModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    rename_source_key,
)

from moeoffload.checkpoint.layout import n_experts_of, per_expert_parameters
from moeoffload.checkpoint.packed_rows import Piece, plan, trace
from moeoffload.checkpoint.tensors import COMPUTE_DTYPES, TensorReader
from moeoffload.checkpoint.weights import Dense, StoredWeight, as_dense
from moeoffload.errors import ModelError
from moeoffload.text import first_line

_PER_EXPERT_OPERATIONS = (Chunk, Concatenate, Interleave, Transpose)
Plans = dict[object, dict[str, tuple[Piece, ...]]]
_MATRICES = ("gate_up_proj", "up_proj", "down_proj")


@dataclass
class Recipe:
    """The stored weights of one or several parameters of an experts module, and their conversion.

    ``targets`` are full parameter names. ``sources`` maps each pattern of the converter to its weights in natural
    order: one per expert, or a single one whose first dimension is the expert. ``converter`` is None if a weight needs
    no conversion; its pattern is then "". ``per_expert`` is False for a parameter that all experts share, which is read
    whole. ``pieces`` holds the packed rows by parameter name, if the module's matrices are packed.
    """

    targets: tuple[str, ...]
    converter: WeightConverter | None
    per_expert: bool
    sources: dict[str, list[StoredWeight]] = field(default_factory=dict)
    pieces: dict[str, tuple[Piece, ...]] = field(default_factory=dict)

    @property
    def expert_bytes(self) -> int:
        """Stored bytes of one expert, if each has its own."""
        weights = self.weights_of(0).items()
        return sum(weight.nbytes // (1 if "*" in pattern else weight.shape[0]) for pattern, weight in weights)

    def read(self, reader: TensorReader, experts: Sequence[int]) -> dict[str, list[torch.Tensor]]:
        """Reads only the bytes of ``experts``; return the source tensors by pattern, in their stored dtypes."""
        if not self.per_expert:
            return {pattern: [reader.read(each.plain) for each in weights] for pattern, weights in self.sources.items()}
        return {
            pattern: [reader.read(weights[expert].plain) for expert in experts]
            if "*" in pattern
            else [reader.read_rows(weights[0].plain, experts)]
            for pattern, weights in self.sources.items()
        }

    def weights_of(self, expert: int) -> dict[str, StoredWeight]:
        """Returns the stored weights that hold ``expert``, by pattern."""
        return {pattern: each[expert if "*" in pattern else 0] for pattern, each in self.sources.items()}

    def convert(self, tensors: dict[str, list[torch.Tensor]], shapes: Any, config: Any) -> dict[str, torch.Tensor]:
        """Converts source tensors to parameters by full name; ``shapes.get_parameter(name)`` gives the required shape.

        Raises ModelError naming the parameter when the tensors do not fit together or do not give the required shape.
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


Sorted = tuple[dict[str, list[Recipe]], Dense]
"""The recipes of the parameters of every experts module, and the dense tensors."""


class Shapes:
    """Replaces the model in conversions that look up a parameter's shape; gives the shape for ``n_experts`` experts."""

    def __init__(self, module_name: str, module: nn.Module, n_experts: int):
        per_expert = per_expert_parameters(module)
        self._parameters = {}
        for name, parameter in module.named_parameters():
            shape = (n_experts, *parameter.shape[1:]) if name in per_expert else tuple(parameter.shape)
            self._parameters[f"{module_name}.{name}"] = torch.empty(shape, dtype=parameter.dtype, device="meta")

    def get_parameter(self, name: str) -> torch.Tensor:
        """Returns a meta tensor with the shape of the parameter ``name``."""
        return self._parameters[name]


def make_recipes(
    model: nn.Module,
    experts: dict[str, nn.Module],
    weights: Sequence[StoredWeight],
    mapping: Sequence[WeightTransform] | None = None,
) -> Sorted:
    """Returns the recipes of all parameters of every experts module, and the dense tensors of ``model``.

    ``model`` is the whole model on the meta device; ``mapping`` converts stored weights to its parameters and is by
    default transformers' own for the family. Raises ModelError naming the parameter when stored weights are missing,
    have a wrong shape or dtype, or would have to be mixed across experts.
    """
    recipes, dense = match_weights(model, experts, weights, mapping)
    plans: Plans = {}
    for name, module in experts.items():
        _check_complete(name, module, recipes[name])
        for recipe in recipes[name]:
            _check_recipe(recipe, name, module, model.config)
        if any(each.packing for recipe in recipes[name] for stored in recipe.sources.values() for each in stored):
            for recipe in recipes[name]:
                recipe.pieces = plan_rows(recipe, name, module, model.config, plans)
    return recipes, as_dense(dense)


def match_weights(
    model: nn.Module,
    experts: dict[str, nn.Module],
    weights: Sequence[StoredWeight],
    mapping: Sequence[WeightTransform] | None = None,
) -> tuple[dict[str, list[Recipe]], list[StoredWeight]]:
    """Groups the stored weights by the expert parameters that they become, as transformers does when it loads; returns
    the recipes by experts module, not yet checked, and the weights of the rest."""
    owners = {f"{name}.{leaf}": name for name, module in experts.items() for leaf, _ in module.named_parameters()}
    known = model.state_dict()
    prefix = model.base_model_prefix
    if mapping is None:
        mapping = _with_single_experts(get_model_conversion_mapping(model), experts)
    renamings = [step for step in mapping if isinstance(step, WeightRenaming)]
    converters = [step for step in mapping if isinstance(step, WeightConverter)]
    converter_of = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    by_target: dict[str, Recipe] = {}
    recipes: dict[str, list[Recipe]] = {name: [] for name in experts}
    dense: list[StoredWeight] = []
    # In natural order (2 before 10) the position in a list is the number of the expert.
    for weight in sorted(weights, key=lambda weight: dot_natural_key(weight.name)):
        renamed, pattern = rename_source_key(weight.name, renamings, converters, prefix, known)
        if renamed not in known and weight.name in known:
            renamed, pattern = rename_source_key(weight.name, [], [], prefix, known)
        if renamed not in owners:
            if renamed in known:
                dense.append(weight)
            continue
        converter = converter_of[pattern] if pattern is not None else None
        if renamed not in by_target:
            by_target[renamed] = _new_recipe(renamed, converter, experts[owners[renamed]], owners)
            recipes[owners[renamed]].append(by_target[renamed])
        recipe = by_target[renamed]
        if recipe.converter is not converter or (converter is None and recipe.sources):
            raise ModelError(f"{renamed}: is stored twice in different layouts, the second time as {weight.name}")
        recipe.sources.setdefault(pattern or "", []).append(weight)
    return recipes, dense


def _with_single_experts(mapping: list[WeightTransform], experts: dict[str, nn.Module]) -> list[WeightTransform]:
    """Adds the conversion of experts that are stored one by one, as quantisers do, where a family's vendor stacks them
    (qwen3_vl_moe)."""
    known = {pattern for step in mapping for pattern in step.source_patterns}
    single: list[WeightTransform] = get_checkpoint_conversion_mapping("qwen2_moe") or []
    modules: Iterable[Any] = experts.values()
    if any(known.intersection(step.source_patterns) for step in single) or not all(
        module.is_concatenated and not module.is_transposed for module in modules
    ):
        return mapping
    return [*mapping, *single]


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
    target, n_experts, converter = recipe.targets[0], n_experts_of(module), recipe.converter
    if converter is not None and (missing := set(converter.source_patterns) - recipe.sources.keys()):
        raise ModelError(f"{target}: the checkpoint has no tensors like {min(missing)}")
    for pattern, weights in recipe.sources.items():
        for weight in weights:
            if weight.packing is None and weight.plain.torch_dtype not in COMPUTE_DTYPES:
                raise ModelError(
                    f"{target}: {weight.name} is stored as {weight.plain.dtype}; "
                    "needed are unquantised weights (bfloat16, float16 or float32)"
                )
        if recipe.per_expert:
            _check_experts(target, pattern, weights, n_experts)
    if converter is not None and recipe.per_expert:
        _check_operations(target, converter.operations)
    # Converting one expert on the meta device checks the shapes, which are the same for all experts.
    sample = {
        pattern: [
            torch.empty(
                (1, *weight.shape[1:]) if recipe.per_expert and "*" not in pattern else weight.shape, device="meta"
            )
            for weight in (weights[:1] if recipe.per_expert else weights)
        ]
        for pattern, weights in recipe.sources.items()
    }
    recipe.convert(sample, Shapes(name, module, 1), config)


def plan_rows(
    recipe: Recipe, name: str, module: Any, config: Any, plans: Plans, *, must: bool = True
) -> dict[str, tuple[Piece, ...]]:
    """Returns the packed rows of a recipe's matrices by parameter name; ``plans`` keeps those of recipes alike.
    Raises ModelError: its conversion does more than move rows; without ``must`` the result is then empty."""
    leaves = {target: target.removeprefix(f"{name}.") for target in recipe.targets}
    if not set(leaves.values()) & set(_MATRICES):
        packed = next((each for stored in recipe.sources.values() for each in stored if each.packing), None)
        if packed is not None:
            raise ModelError(f"{recipe.targets[0]}: {packed.name} is packed, and it is no matrix; not supported")
        return {}
    firsts = recipe.weights_of(0)
    stored = tuple((each.shape, each.packing or each.plain.dtype) for each in firsts.values())
    key = id(recipe.converter), tuple(leaves.values()), stored
    if key not in plans:
        traced = recipe.convert(trace(firsts), Shapes(name, module, 1), config)
        matrices = {
            target: traced[target][0].t() if module.is_transposed else traced[target][0] for target in recipe.targets
        }
        try:
            found = {leaves[target]: plan(target, matrix, [*firsts.values()]) for target, matrix in matrices.items()}
        except ModelError:
            if must:
                raise
            found = {}
        plans[key] = found
    return plans[key]


def _check_experts(target: str, pattern: str, weights: Sequence[StoredWeight], n_experts: int) -> None:
    first = weights[0]
    if "*" not in pattern:
        if len(weights) != 1 or first.shape[:1] != (n_experts,):
            raise ModelError(f"{target}: {first.name} has shape {first.shape}, its first dimension must be {n_experts}")
        return
    if len(weights) != n_experts:
        raise ModelError(
            f"{target}: the checkpoint has tensors like {first.name} for {len(weights)} of {n_experts} experts"
        )
    for weight in weights:
        if weight.shape != first.shape:
            raise ModelError(f"{target}: {weight.name} has shape {weight.shape}, {first.name} has {first.shape}")
        if (weight.packing and weight.packing.packed) != (first.packing and first.packing.packed):
            raise ModelError(f"{target}: {weight.name} and {first.name} are stored in different formats")
        if weight.packing is None and weight.plain.dtype != first.plain.dtype:
            raise ModelError(
                f"{target}: {weight.name} is stored as {weight.plain.dtype}, {first.name} in another dtype"
            )


def _check_operations(target: str, operations: Sequence[Any]) -> None:
    for position, operation in enumerate(operations):
        dims = [getattr(operation, dim) for dim in ("dim", "dim0", "dim1") if hasattr(operation, dim)]
        if position == 0 and isinstance(operation, MergeModulelist) and dims == [0]:
            continue
        if not isinstance(operation, _PER_EXPERT_OPERATIONS) or 0 in dims:
            raise ModelError(f"{target}: its conversion step {operation!r} mixes experts; not supported")
