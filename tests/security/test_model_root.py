"""Which models a host can make a server read: no path leads out of the allowed folders."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest
from command_lines import STEP_TIMEOUT_S
from conftest import DEMO

from moeoffload.checkpoint import Checkpoint
from moeoffload.control.protocol import dtype_label
from moeoffload.control.v1 import expert_service_pb2 as pb
from moeoffload.errors import ModelError, ServerError
from moeoffload.expert_server.model_roots import ModelRoots
from security.conftest import Site


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    """models/good, models/link -> good, models/out -> ../secret, secret, models-too."""
    for name in ("models/good", "secret", "models-too"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "models" / "link").symlink_to(tmp_path / "models" / "good")
    (tmp_path / "models" / "out").symlink_to(tmp_path / "secret")
    return tmp_path


def roots(*folders: Path, any_model: bool = False) -> tuple[ModelRoots, list[str]]:
    refused: list[str] = []
    return ModelRoots(tuple(folders), any_model, refused.append), refused


@pytest.mark.parametrize("path", ["models/good", "models/link", "models", "secret/../models/good", "models/absent"])
def test_what_is_inside_is_resolved(folders: Path, path: str) -> None:
    rule, refused = roots(folders / "models")
    assert rule.resolve(f"{folders}/{path}", None) == Path(os.path.realpath(folders / path))
    assert refused == []


@pytest.mark.parametrize(
    "path",
    ["secret", "models/../secret", "models/good/../../secret", "models/out", "models-too", "models/out/..", "absent"],
)
def test_what_is_outside_is_refused_whether_it_is_there_or_not(folders: Path, path: str) -> None:
    rule, refused = roots(folders / "models")
    with pytest.raises(ModelError, match="is no model below"):
        rule.resolve(f"{folders}/{path}", None)
    assert len(refused) == 1


@pytest.mark.parametrize(
    "reference", ["", ".", "..", "../secret", "~", "~root", "~/x", "/", "\0", "/a\0b", "a/../../b", "a" * 5000, "/" * 9]
)
def test_no_odd_reference_gets_through(folders: Path, reference: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folders / "models")
    rule, refused = roots(folders / "models" / "good")
    with pytest.raises(ModelError, match="reads no others for hosts"):
        rule.resolve(reference, None)
    assert len(refused) == 1


def test_a_relative_folder_is_no_hub_id(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folders)
    rule, _ = roots()
    for reference in ("secret", "models/good"):
        with pytest.raises(ModelError, match="in the hub cache"):
            rule.resolve(reference, None)


def test_a_hub_id_in_the_cache_is_resolved_and_nothing_is_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "models--org--demo" / "snapshots" / "0123456789abcdef0123456789abcdef01234567"
    snapshot.mkdir(parents=True)
    for file in DEMO.iterdir():
        (snapshot / file.name).symlink_to(file)
    (tmp_path / "models--org--demo" / "refs").mkdir()
    (tmp_path / "models--org--demo" / "refs" / "main").write_text(snapshot.name)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("moeoffload.checkpoint.locate._from_hub", lambda *args: pytest.fail("a download"))
    rule, _ = roots()
    assert rule.resolve("org/demo", None) == snapshot
    for reference, revision in (("org/other", None), ("org/demo", "v2"), ("org/demo", "../../..")):
        with pytest.raises(ModelError):
            rule.resolve(reference, revision)


def test_for_the_same_user_every_reference_goes_on_as_it_is(folders: Path) -> None:
    rule, refused = roots(any_model=True)
    assert rule.resolve(f"{folders}/secret", None) == f"{folders}/secret"
    assert refused == []


def test_a_server_reads_models_below_its_root_and_no_others(site: Site) -> None:
    checkpoint = Checkpoint.open(DEMO)

    def calibrate(reference: str) -> list[tuple[int, float]]:
        model = pb.ModelReference(
            reference=reference, digest=checkpoint.digest, compute_dtype=dtype_label(checkpoint.dtype)
        )
        with contextlib.closing(site.client()) as client:
            lease = client.attach(STEP_TIMEOUT_S)
            try:
                return lease.calibrate(model, STEP_TIMEOUT_S)
            finally:
                lease.close()

    assert calibrate(f"{site.root}/demo")
    for outside in (str(DEMO), f"{site.root}/../models/../../x", "/etc"):
        with site.refused("--model-root"), pytest.raises(ServerError, match="reads no others for hosts"):
            calibrate(outside)
