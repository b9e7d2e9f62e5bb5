"""Quantised checkpoints of the published layouts: what is read is, bit for bit, what the formats' libraries unpack."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from synthetic import Quantised, write_tiny
from synthetic.unpacked import unpacked_model

from moeoffload.checkpoint import Checkpoint
from moeoffload.checkpoint.tensors import TensorIndex
from moeoffload.errors import ModelError
from moeoffload.formats import PackedWeights, conversion
from moeoffload.host.model import load_dense_model

from .conftest import CPU, assert_read_alone, rewrite
from .quantised import CASES, CUT, WIDE, Case, write

EXPERTS = (3, 1, 7)
OFTEN = 63  # so often is an expert asked for that the thread that reads the next one has read it before


def unpacked(pieces: tuple[PackedWeights, ...], dtype: torch.dtype, *, transposed: bool) -> torch.Tensor:
    weight = torch.cat([piece.unpack(dtype) for piece in pieces], dim=1)
    return weight.transpose(1, 2) if transposed else weight


def matrices(checkpoint: Checkpoint, model: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Ours, as rows and as tiles where this CPU multiplies these, and theirs of all matrices of some experts."""
    for layer in checkpoint.layers:
        theirs = model.get_submodule(layer.module_name)
        for name, in_tiles in itertools.product(("gate_up_proj", "down_proj"), (False, True)):
            ours: Any = checkpoint.build_experts(layer.index, EXPERTS, CPU, in_tiles=in_tiles)
            packed = unpacked(getattr(ours, name), checkpoint.dtype, transposed=ours.is_transposed)
            yield packed, theirs.get_parameter(name)[list(EXPERTS)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_experts_and_dense_tensors_are_those_that_the_formats_library_unpacks(case: Case, tmp_path: Path) -> None:
    folder = write(case, tmp_path)
    model = unpacked_model(folder, case.form)
    checkpoint = Checkpoint.open(folder)
    for ours, theirs in matrices(checkpoint, model):
        assert ours.dtype is theirs.dtype is torch.bfloat16
        assert torch.equal(ours, theirs)
    whole = model.state_dict()
    dense = load_dense_model(checkpoint, CPU).state_dict()
    assert dense.keys() == {name for name in whole if ".experts." not in name}
    for name, tensor in dense.items():
        assert torch.equal(tensor, whole[name]), name


@pytest.mark.parametrize("in_tiles", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_expert_read_after_others_is_the_one_read_alone(case: Case, in_tiles: bool, tmp_path: Path) -> None:
    assert_read_alone(Checkpoint.open(write(case, tmp_path)), 1, in_tiles=in_tiles)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_expert_costs_what_it_costs_in_the_file(case: Case, tmp_path: Path) -> None:
    folder = write(case, tmp_path)
    checkpoint = Checkpoint.open(folder)
    stored = load_file(folder / "model.safetensors")
    in_file = sum(tensor.nbytes for name, tensor in stored.items() if ".experts." in name and "g_idx" not in name)
    in_memory = sum(layer.n_experts * layer.expert_bytes for layer in checkpoint.layers)
    # Scales that 128 rows share lie beside each row where the blocks of gate and up do not stay whole.
    cut = case.form is Quantised.FP8 and case.values is CUT
    assert in_memory == pytest.approx(in_file, rel=0.03 if not cut else 0.2)
    module: Any = checkpoint.build_experts(0, range(8), CPU)
    pieces = [piece for name in ("gate_up_proj", "down_proj") for piece in getattr(module, name)]
    held = sum(piece.nbytes for piece in pieces) + sum(parameter.nbytes for parameter in module.parameters())
    assert held == 8 * checkpoint.layers[0].expert_bytes
    assert {piece.format.name for piece in pieces} == {case.name} == {checkpoint.layers[0].format}


EXPERT = "model.layers.1.mlp.experts.2.down_proj"
DENSE = "model.layers.0.self_attn.o_proj"


@pytest.mark.parametrize("base", [EXPERT, DENSE])
@pytest.mark.parametrize(
    ("form", "part", "change", "pattern"),
    [
        (Quantised.FP8, "weight_scale_inv", None, r"weight: is stored as F8_E4M3, and has no scale"),
        (Quantised.FP8, "weight_scale_inv", lambda scale: scale[:-1], r"weight: its scale has shape"),
        (Quantised.FP8, "weight_scale_inv", lambda scale: scale.to(torch.int32), r"weight: its scale is stored as"),
        (Quantised.FP8, "weight", lambda weight: weight.flatten(), r"weight: has shape \(\d+,\), needed is one matrix"),
        (Quantised.INT4, "weight_scale", None, r"weight_packed: is stored as I32, and has no scale"),
        (
            Quantised.GPTQ,
            "qzeros",
            lambda zeros: zeros.to(torch.uint8),
            r"qweight: its zeros are stored as torch.uint8",
        ),
        (Quantised.INT4, "weight_scale", lambda scale: scale[:, :-1], r"weight_packed: .* fit no group"),
        (Quantised.MXFP4, "weight_scale", lambda scale: scale[:, :-1], r"weight_packed: its scale has shape"),
        (Quantised.GPTQ, "qzeros", None, r"qweight: is stored as I32, and has no zeros"),
        (Quantised.GPTQ, "scales", lambda scale: scale[:, :-8], r"qweight: its scales has shape"),
        (Quantised.AWQ, "qzeros", lambda zeros: zeros[:, :-1], r"qweight: its zeros has shape"),
        (Quantised.AWQ, "scales", lambda scale: scale.to(torch.int8), r"qweight: its scales are stored as"),
    ],
)
def test_parts_that_are_missing_or_do_not_fit_are_refused_by_name(
    form: Quantised,
    part: str,
    change: Callable[[torch.Tensor], torch.Tensor] | None,
    pattern: str,
    base: str,
    tmp_path: Path,
) -> None:
    folder = write(Case("qwen3_moe", form, "", WIDE | {"head_dim": 64}), tmp_path)

    def damage(tensors: dict[str, torch.Tensor]) -> None:
        old = tensors.pop(f"{base}.{part}")
        if change is not None:
            tensors[f"{base}.{part}"] = change(old)

    rewrite(folder, damage)
    with pytest.raises(ModelError, match=re.escape(f"{base}.") + pattern) as caught:
        Checkpoint.open(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("form", "part", "change", "pattern"),
    [
        (Quantised.GPTQ, "g_idx", lambda order: order.flip(0), r"g_idx, desc_act"),
        (Quantised.GPTQ, "qzeros", lambda zeros: zeros + 1, r"not all of its zeros are 8"),
        (Quantised.INT4, "weight_shape", lambda shape: shape - 8, r"its weight_shape is"),
    ],
)
def test_values_that_do_not_fit_are_refused_when_they_are_read(
    form: Quantised, part: str, change: Callable[[torch.Tensor], torch.Tensor], pattern: str, tmp_path: Path
) -> None:
    folder = write(Case("qwen3_moe", form, "", WIDE), tmp_path)
    rewrite(folder, lambda tensors: tensors.update({f"{EXPERT}.{part}": change(tensors[f"{EXPERT}.{part}"])}))
    checkpoint = Checkpoint.open(folder)
    checkpoint.build_experts(1, [0, 1, 3], CPU)
    for experts in ([2], [1] * OFTEN + [2]):
        with pytest.raises(ModelError, match=re.escape(f"{EXPERT}.weight: ") + ".*" + pattern):
            checkpoint.build_experts(1, experts, CPU)


@pytest.mark.parametrize(
    ("form", "settings", "pattern"),
    [
        (Quantised.GPTQ, {"bits": 8}, r"gptq with 8 bits"),
        (Quantised.GPTQ, {"desc_act": True}, r"gptq with desc_act"),
        (Quantised.GPTQ, {"checkpoint_format": "marlin"}, r"gptq with checkpoint_format marlin"),
        (Quantised.GPTQ, {"group_size": 64}, r"qweight: its scales has shape"),
        (Quantised.AWQ, {"bits": 3}, r"awq with 3 bits"),
        (Quantised.AWQ, {"version": "gemv"}, r"awq, version gemv"),
        (Quantised.INT4, {"config_groups": {}}, r"without config_groups"),
        (Quantised.INT4, {"config_groups": {"group_0": {"weights": {}, "format": "nvfp4-pack-quantized"}}}, r"nvfp4"),
        (Quantised.FP8, {"weight_block_size": [128, "x"]}, r"weight: weight_block_size is \[128, 'x'\]"),
        (Quantised.FP8, {"weight_block_size": [128, 100]}, r"weight_block_size is 128 x 100"),
        (Quantised.FP8, {"weight_block_size": [128, 2**63]}, r"its groups are larger than"),
        (Quantised.INT4, {"transform_config": {"config_groups": {"a": {}}}}, r"transform_config"),
        (Quantised.FP8, {"quant_method": "quark"}, r"\(quark; known are awq, compressed-tensors, fp8, gptq, mxfp4"),
    ],
)
def test_settings_that_are_not_supported_are_refused_by_name(
    form: Quantised, settings: dict[str, Any], pattern: str, tmp_path: Path
) -> None:
    folder = write(Case("qwen3_moe", form, "", WIDE), tmp_path)
    settle(folder, **settings)
    with pytest.raises(ModelError, match=pattern) as caught:
        Checkpoint.open(folder)
    assert "\n" not in str(caught.value)


def settle(folder: Path, **settings: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= settings
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
def test_zeros_of_an_asymmetric_gptq_checkpoint(version: str, tmp_path: Path) -> None:
    """GPTQModel subtracts 1 from each zero of the first version a word at a time: 0 borrows from its neighbour."""
    folder = write(Case("qwen3_moe", Quantised.GPTQ, "", WIDE), tmp_path)
    words = torch.randint(-(1 << 31), 1 << 31, (3, 32), generator=torch.manual_seed(6)).to(torch.int32)
    stored = {f"{EXPERT}.qzeros": words - (0x11111111 if version == "gptq" else 0)}
    rewrite(folder, lambda tensors: tensors.update(stored))
    settle(folder, sym=False, checkpoint_format=version)
    tensors = load_file(folder / "model.safetensors")
    codes, zeros = (
        torch.stack([part >> 4 * nibble & 15 for nibble in range(8)], dim)
        for part, dim in ((tensors[f"{EXPERT}.qweight"], 1), (words, 2))
    )
    assert (zeros == 0).any()
    scales = tensors[f"{EXPERT}.scales"].float().repeat_interleave(128, 0)
    expected = (codes.flatten(0, 1) - zeros.flatten(1).repeat_interleave(128, 0)) * scales
    down: Any = Checkpoint.open(folder).build_experts(1, [2], CPU).down_proj
    assert torch.equal(down[0].unpack(torch.float32)[0], expected.t())


@pytest.mark.parametrize("more", [{"group_size": -1}, {"static_groups": True}])
def test_gptq_columns_that_were_sorted_but_keep_their_groups(more: dict[str, Any], tmp_path: Path) -> None:
    folder = write(Case("qwen3_moe", Quantised.GPTQ, "", WIDE), tmp_path)

    def widen(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            if name.endswith(("scales", "qzeros")):
                tensors[name] = tensor[:1]
            elif name.endswith("g_idx"):
                tensor.zero_()

    if "group_size" in more:
        rewrite(folder, widen)
    model = unpacked_model(folder, Quantised.GPTQ)
    settle(folder, desc_act=True, **more)
    for ours, theirs in matrices(Checkpoint.open(folder), model):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("form", [Quantised.INT8, Quantised.FP8])
def test_what_compressed_tensors_reads_in_other_spellings(form: Quantised, tmp_path: Path) -> None:
    """4-bit integers in a byte each; blocks named by a text."""
    folder = write(Case("qwen3_moe", form, "", WIDE), tmp_path)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            if name.endswith("_scale_inv"):
                tensors[name.removesuffix("_inv")] = tensors.pop(name)
            elif tensors[name].dtype is torch.int8:
                tensors[name] >>= 4

    rewrite(folder, change)
    weights = {"num_bits": 4, "type": "int", "strategy": "channel"}
    if form is Quantised.FP8:
        weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": "128x128"}
    layout = "float-quantized" if form is Quantised.FP8 else "int-quantized"
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "format": layout}}
    settle(folder, quant_method="compressed-tensors", format=layout, config_groups=groups)
    model = unpacked_model(folder, Quantised.INT8)
    for ours, theirs in matrices(Checkpoint.open(folder), model):
        assert torch.equal(ours, theirs)


def test_a_file_that_shrinks_after_it_was_opened(tmp_path: Path) -> None:
    folder = write(CASES[0], tmp_path)
    checkpoint = Checkpoint.open(folder)
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match=r"truncated: tensor model\.layers.* ends early"):
        checkpoint.build_experts(0, [0], CPU)
    with pytest.raises(ModelError, match=r"transformers cannot load it: .*truncated: tensor .* ends early"):
        load_dense_model(checkpoint, CPU)


def test_an_expert_whose_bytes_were_cut_off_after_the_file_was_opened(tmp_path: Path) -> None:
    folder = write(Case("qwen3_moe", Quantised.FP8, "", WIDE), tmp_path)
    checkpoint = Checkpoint.open(folder)
    last = TensorIndex.open(folder)["model.layers.1.mlp.experts.2.up_proj.weight"]
    os.truncate(folder / "model.safetensors", last.offset + last.nbytes - 1)
    checkpoint.build_experts(1, [0, 1], CPU)
    with pytest.raises(
        ModelError, match=r"truncated: tensor model\.layers\.1\.mlp\.experts\.2\.up_proj\.weight ends early"
    ):
        checkpoint.build_experts(1, [1] * OFTEN + [2], CPU)


def plain_up(tensors: dict[str, torch.Tensor], experts: Sequence[int]) -> dict[str, torch.Tensor]:
    """Store up projections of some experts of layer 1 as bfloat16."""
    written = {}
    for expert in experts:
        name = f"model.layers.1.mlp.experts.{expert}.up_proj.weight"
        written[name] = tensors[name].to(torch.bfloat16) * tensors.pop(f"{name}_scale_inv").mean().to(torch.bfloat16)
    tensors.update(written)
    return written


def test_gate_and_up_in_different_formats_are_two_pieces(tmp_path: Path) -> None:
    folder = write(Case("qwen3_moe", Quantised.FP8, "", WIDE), tmp_path)
    written: dict[str, torch.Tensor] = {}
    rewrite(folder, lambda tensors: written.update(plain_up(tensors, range(8))))
    checkpoint = Checkpoint.open(folder)
    assert [layer.format for layer in checkpoint.layers] == ["fp8", "bf16+fp8"]
    model = unpacked_model(folder, CASES[1].form)
    for ours, theirs in matrices(checkpoint, model):
        assert torch.equal(ours, theirs)
    module: Any = checkpoint.build_experts(1, EXPERTS, CPU)
    gate, up = module.gate_up_proj
    assert (gate.format.name, up.format.name) == ("fp8", "bf16")
    assert torch.equal(up.unpack(torch.bfloat16)[0], written["model.layers.1.mlp.experts.3.up_proj.weight"])


def test_experts_in_different_formats_are_refused(tmp_path: Path) -> None:
    folder = write(Case("qwen3_moe", Quantised.FP8, "", WIDE), tmp_path)
    rewrite(folder, lambda tensors: plain_up(tensors, [4]))
    pattern = r"gate_up_proj: .*experts\.4\.up_proj\.weight and .*experts\.0\.up_proj.weight are stored in different"
    with pytest.raises(ModelError, match=pattern):
        Checkpoint.open(folder)


def test_layers_that_the_config_excludes_stay_plain(tmp_path: Path) -> None:
    folder = write(Case("qwen3_moe", Quantised.FP8, "", WIDE), tmp_path)

    def unpack(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if ".layers.0.mlp.experts" in name and name.endswith("weight")]:
            tensors[name] = tensors[name].to(torch.bfloat16)
            del tensors[f"{name}_scale_inv"]

    rewrite(folder, unpack)
    checkpoint = Checkpoint.open(folder)
    assert [layer.format for layer in checkpoint.layers] == ["bf16", "fp8"]
    assert [round(8 * layer.expert_bytes / layer.n_weights) for layer in checkpoint.layers] == [16, 8]
    module = checkpoint.build_experts(0, [1], CPU)
    assert isinstance(module.gate_up_proj, torch.nn.Parameter)


def test_blocks_that_rows_and_columns_do_not_fill(tmp_path: Path) -> None:
    """DeepSeek V3 has a weight of 576 rows: five rows of blocks, the last a half. transformers refuses it."""
    folder = write(Case("qwen3_moe", Quantised.FP8, "", {"hidden_size": 192, "moe_intermediate_size": 320}), tmp_path)
    stored = load_file(folder / "model.safetensors")
    checkpoint = Checkpoint.open(folder)
    module: Any = checkpoint.build_experts(1, EXPERTS, CPU)
    up, down = (unpacked(part, torch.float32, transposed=False) for part in (module.gate_up_proj, module.down_proj))
    for slot, expert in enumerate(EXPERTS):
        base = f"model.layers.1.mlp.experts.{expert}"
        for part, ours in (("gate", up[slot, :320]), ("up", up[slot, 320:]), ("down", down[slot])):
            codes, scales = (stored[f"{base}.{part}_proj.weight{end}"] for end in ("", "_scale_inv"))
            assert len(codes) % 128
            assert len(scales) == -(-len(codes) // 128)
            for row, column in ((0, 0), (127, 127), (128, 128), (len(codes) - 1, codes.shape[1] - 1)):
                assert ours[row, column] == codes[row, column].float() * scales[row // 128, column // 128]


def test_experts_are_built_in_inference_mode(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write(CASES[5], tmp_path))
    with torch.inference_mode():
        module: Any = checkpoint.build_experts(0, EXPERTS, CPU)
    assert not any(part.data.is_inference() for part in module.gate_up_proj)


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_do_not_change_what_is_read(threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts are read into memory that the next read of the same thread takes."""
    checkpoint = Checkpoint.open(write(CASES[12], tmp_path))
    monkeypatch.setattr("moeoffload.checkpoint.checkpoint._MOST_THREADS", threads)
    assert_read_alone(checkpoint, 0, times=1)


@pytest.mark.parametrize("case", [case for case in CASES if case.name == "int4"], ids=str)
def test_without_the_library_the_same_is_read(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = Checkpoint.open(write(case, tmp_path))
    by_library: Any = checkpoint.build_experts(1, EXPERTS, CPU)
    monkeypatch.setattr(conversion, "_library", lambda: None)
    by_torch: Any = checkpoint.build_experts(1, EXPERTS, CPU)
    for name in ("gate_up_proj", "down_proj"):
        for ours, theirs in zip(getattr(by_torch, name), getattr(by_library, name), strict=True):
            assert torch.equal(ours.data, theirs.data)


def test_an_expert_that_is_stored_in_another_dtype_is_refused(tmp_path: Path) -> None:
    write_tiny("qwen3_moe", tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.update({f"{EXPERT}.weight": tensors[f"{EXPERT}.weight"].half()}))
    with pytest.raises(ModelError, match="F16"):
        Checkpoint.open(tmp_path)
