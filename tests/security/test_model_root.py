"""Which models a host can make a server read: no path leads out of the allowed folders."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from command_lines import STEP_TIMEOUT_S
from conftest import DEMO
from models import reference_of

from moeoffload.checkpoint import Checkpoint
from moeoffload.checkpoint.tensors import open_regular, read_regular
from moeoffload.errors import ModelError, ServerError
from moeoffload.expert_server.agreement import Models
from security.conftest import Site


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    """models/good, models/link -> good, models/out -> ../secret, secret, models-too; models in GGUF files likewise."""
    for name in ("models/good", "secret", "models-too"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "models" / "link").symlink_to(tmp_path / "models" / "good")
    (tmp_path / "models" / "out").symlink_to(tmp_path / "secret")
    for name in ("secret/m.gguf", "models/blob"):
        (tmp_path / name).touch()
    (tmp_path / "models" / "out.gguf").symlink_to(tmp_path / "secret" / "m.gguf")
    (tmp_path / "models" / "in.gguf").symlink_to(tmp_path / "models" / "blob")
    return tmp_path


def roots(*folders: Path, any_model: bool = False) -> tuple[Callable[..., str | Path], list[str]]:
    """What resolves the names of hosts, and the reasons of its refusals."""
    refused: list[str] = []
    return partial(Models(None, folders, any_model).resolve, on_refused=refused.append), refused


@pytest.mark.parametrize("path", ["models/good", "models/link", "models", "secret/../models/good", "models/absent"])
def test_what_is_inside_is_resolved(folders: Path, path: str) -> None:
    rule, refused = roots(folders / "models")
    assert rule(f"{folders}/{path}", None) == Path(os.path.realpath(folders / path))
    assert refused == []


def test_a_gguf_file_keeps_its_name_though_it_is_a_link_to_one_without_that_ending(folders: Path) -> None:
    """As in a hub cache."""
    assert roots(folders / "models")[0](f"{folders}/models/in.gguf", None) == folders / "models" / "in.gguf"


OUTSIDE = ["secret", "models/../secret", "models/good/../../secret", "models/out", "models-too", "models/out/.."]
OUTSIDE += ["absent", "secret/m.gguf", "models/out.gguf", "models/../secret/m.gguf", "models/../secret/../models.gguf"]


@pytest.mark.parametrize("path", OUTSIDE)
def test_what_is_outside_is_refused_whether_it_is_there_or_not(folders: Path, path: str) -> None:
    rule, refused = roots(folders / "models")
    with pytest.raises(ModelError, match="is no model below"):
        rule(f"{folders}/{path}", None)
    assert len(refused) == 1


@pytest.mark.parametrize(
    "reference", ["", ".", "..", "../secret", "~", "~root", "~/x", "/", "\0", "/a\0b", "a/../../b", "a" * 5000, "/" * 9]
)
def test_no_odd_reference_gets_through(folders: Path, reference: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folders / "models")
    rule, refused = roots(folders / "models" / "good")
    with pytest.raises(ModelError, match="reads no others for hosts"):
        rule(reference, None)
    assert len(refused) == 1


def test_a_relative_folder_is_no_hub_id(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folders)
    rule, _ = roots()
    for reference in ("secret", "models/good"):
        with pytest.raises(ModelError, match="in the hub cache"):
            rule(reference, None)


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
    assert rule("org/demo", None) == rule("org/demo", snapshot.name) == snapshot
    for reference, revision in (("org/other", None), ("org/demo", "v2"), ("org/demo", "../../..")):
        with pytest.raises(ModelError):
            rule(reference, revision)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub cache with nothing of use in it, and a complete model beside it."""
    refs = tmp_path / "hub" / "models--org--demo" / "refs"
    refs.mkdir(parents=True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    shutil.copytree(DEMO, tmp_path / "outside")
    return tmp_path


@pytest.mark.parametrize("form", ["{}/pointer", "../../../pointer", "{}/outside", "..", "a/../../b", "a//b", "", "\0"])
@pytest.mark.parametrize("repository", ["org/demo", "org/absent"])
def test_a_revision_leads_nowhere(hub: Path, repository: str, form: str) -> None:
    (hub / "pointer").write_text(str(hub / "outside"))
    rule, refused = roots()
    with pytest.raises(ModelError, match="is no name of a branch, tag or commit"):
        rule(repository, form.format(hub))
    assert refused == ["it named a revision that is no name"]


@pytest.mark.parametrize("content", ["{}/outside", "../../../outside", "0" * 39, "0" * 5000, "\0"])
def test_a_ref_of_the_cache_names_a_commit_and_nothing_else(hub: Path, content: str) -> None:
    (hub / "hub" / "models--org--demo" / "refs" / "main").write_text(content.format(hub))
    with pytest.raises(ModelError, match="is no model"):
        roots()[0]("org/demo", None)


def test_a_snapshot_of_the_cache_that_leads_out_of_it_is_refused(hub: Path) -> None:
    snapshots = hub / "hub" / "models--org--demo" / "snapshots"
    snapshots.mkdir()
    (snapshots / ("0" * 40)).symlink_to(hub / "outside")
    with pytest.raises(ModelError, match="is no model"):
        roots()[0]("org/demo", "0" * 40)


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")], ids=["pipe", "zeros"])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "model.safetensors", "refs/main"])
@pytest.mark.timeout(20)
def test_pipes_and_devices_are_not_read(hub: Path, make: Callable[[Path], object], name: str) -> None:
    folder = hub / "hub" / "models--org--demo" if "/" in name else hub / "outside"
    (folder / name).unlink(missing_ok=True)
    make(folder / name)
    if name == "model.safetensors.index.json":
        (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError):
        Checkpoint.open(roots(hub / "outside")[0]("org/demo" if "/" in name else str(folder), None))
    for read in (open_regular, lambda path: read_regular(path, 10)):
        with pytest.raises(ModelError, match="no regular file"):
            read(folder / name)


def test_a_config_that_is_too_large_for_one_is_not_parsed(hub: Path) -> None:
    with (hub / "outside" / "config.json").open("r+b") as file:
        file.truncate(1 << 30)
    with pytest.raises(ModelError, match="has more than 4194304 bytes"):
        Checkpoint.open(hub / "outside")


def test_for_the_same_user_every_reference_goes_on_as_it_is(folders: Path) -> None:
    rule, refused = roots(any_model=True)
    assert rule(f"{folders}/secret", None) == f"{folders}/secret"
    assert refused == []


def test_a_server_reads_models_below_its_root_and_no_others(site: Site) -> None:
    checkpoint = Checkpoint.open(DEMO)

    def calibrate(reference: str, revision: str = "") -> list[tuple[int, float]]:
        with contextlib.closing(site.client()) as client, contextlib.closing(client.attach(STEP_TIMEOUT_S)) as lease:
            return lease.calibrate(reference_of(checkpoint, reference, revision=revision), STEP_TIMEOUT_S)

    assert calibrate(f"{site.root}/demo")
    for outside in (str(DEMO), f"{site.root}/../models/../../x", "/etc"):
        with site.refused("--model-root"), pytest.raises(ServerError, match="reads no others for hosts"):
            calibrate(outside)
    pointer = site.root / "pointer"
    pointer.write_text(str(DEMO))
    with site.refused("it named a revision"), pytest.raises(ServerError, match="is no name of a branch"):
        calibrate("org/absent", str(pointer))
