"""Without the C library, or without an OpenMP runtime, everything is computed, and one line says why it is slower."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from moeoffload import native
from moeoffload.errors import ModelError
from moeoffload.formats import quantise
from moeoffload.kernels import KernelInput, LayerKernels, calls, grouped_experts, threads
from moeoffload.kernels.attention import takes_many
from moeoffload.kernels.fast_dense import accelerate_dense

from .experts import call, gated_experts, random_call
from .test_dense import small_model, state


@pytest.fixture
def unbuilt(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if the package had been installed without a compiler."""
    for module in (native, calls, quantise):
        monkeypatch.setattr(module, "native_library", lambda: None)
    kept = (calls.library, native.cpu_features, quantise._library)
    for function in kept:
        function.cache_clear()
    yield
    for function in kept:
        function.cache_clear()


@pytest.mark.usefixtures("unbuilt")
def test_experts_fall_back_to_the_grouped_kernel(caplog: pytest.LogCaptureFixture) -> None:
    experts = gated_experts(4, 64, 32, torch.bfloat16)
    layers = [LayerKernels(experts) for _ in range(2)]
    inputs = random_call(5, 64, torch.bfloat16, 2, 4, absent=0.2)
    assert layers[0].falls_back == "CPU kernels are not built"
    assert layers[0].kernel_for(1) == "grouped"
    assert torch.equal(call(layers[0], *inputs), grouped_experts(experts, *inputs))
    out = torch.empty(5, 64)
    assert sum(1 for _ in layers[1].in_slices(KernelInput(*inputs, out))) == 1
    assert torch.equal(out, call(layers[0], *inputs))
    with pytest.raises(ValueError, match="not built"):
        LayerKernels(experts, kernel="tiled")
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "install a C compiler" in said


@pytest.mark.usefixtures("unbuilt")
def test_linear_layers_norms_and_attention_stay_torchs(caplog: pytest.LogCaptureFixture) -> None:
    model = small_model("qwen3_moe")
    before = state(model)
    accelerate_dense(model)
    assert state(model) == before
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert not takes_many(torch.bfloat16)


@pytest.mark.usefixtures("unbuilt")
def test_weights_are_not_quantised() -> None:
    with pytest.raises(ModelError, match="install a C compiler"):
        quantise.quantise(torch.ones(1, 32, 32), quantise.FORMATS["int4"])


@pytest.mark.skipif(calls.library() is None, reason="the C library was not built")
@pytest.mark.parametrize("maps", ["", "7f00-7f01 r-xp 0 08:01 1 /nowhere/libgomp.so.1\n"], ids=["none", "unreadable"])
def test_one_thread_is_announced(
    maps: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "maps").write_text(maps)
    monkeypatch.setattr(threads, "_MAPS", tmp_path / "maps")
    threads.parallel_address.cache_clear()
    before = torch.get_num_threads()
    layer = LayerKernels(gated_experts(8, 512, 384, torch.bfloat16), kernel="tiled")
    inputs = random_call(5, 512, torch.bfloat16, 4, 8)
    try:
        torch.set_num_threads(1)
        alone = call(layer, *inputs)
        assert not caplog.records, "nobody asked for more threads"
        torch.set_num_threads(2)
        assert torch.equal(call(layer, *inputs), alone)
        assert torch.equal(call(layer, *inputs), alone)
    finally:
        torch.set_num_threads(before)
        threads.parallel_address.cache_clear()
    (said,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "run on one thread" in said.getMessage()


@pytest.mark.parametrize(
    ("maps", "path"),
    [
        ("7f00-7f01 r-xp 0 08:01 1    /my libs/libgomp-a34b.so.1\n", "/my libs/libgomp-a34b.so.1"),
        ("7f00-7f01 r-xp 0 08:01 1    /usr/lib/libiomp5.so\n7f02-7f03 rw-p 0 0 0 [heap]\n", "/usr/lib/libiomp5.so"),
        ("7f00-7f01 r-xp 0 08:01 1    /usr/lib/libompt.so\n", None),
    ],
)
def test_the_openmp_runtime_is_found_wherever_it_is(maps: str, path: str | None) -> None:
    assert threads.openmp_runtime(maps) == path
