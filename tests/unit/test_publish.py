"""Uploads against a hub in memory: whole or not loadable, private by default, nothing that does not verify."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import run
from tests.support.conversions import convert
from tests.support.fake_hub import FakeHub
from tests.support.hub_server import hub_server
from tests.support.tiny_models import write_tiny
from tqtool.artifact.publish import LAST, UploadRequest, plan_upload, upload
from tqtool.errors import ArtifactError, BackendError, UserError

REPO = "someone/tiny-4bit"


@pytest.fixture(scope="module")
def made(tmp_path_factory: Any) -> Path:
    folder = tmp_path_factory.mktemp("upload")
    convert(write_tiny(folder / "source"), folder / "q4")
    return folder / "q4"


@pytest.fixture
def artifact(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "q4"))


def planned(artifact: Path, **changes: Any) -> Any:
    return plan_upload(UploadRequest(artifact=artifact, repo=REPO, depth="none", **changes))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_everything_arrives_and_the_config_last(artifact: Path) -> None:
    hub, plan = FakeHub(), planned(artifact)
    done = upload(plan, hub)
    hub.files.pop(".gitattributes")
    assert hub.files == contents(artifact)
    assert (hub.private, done.files, done.was_complete) == (True, len(hub.files), False)
    assert done.total_bytes == plan.total_bytes == sum(map(len, hub.files.values()))
    assert [kind for kind, _ in hub.commits] == ["upload", "upload"]
    assert sorted(hub.commits[1][1]) == sorted(LAST)


def test_a_broken_line_leaves_nothing_loadable_and_goes_on(artifact: Path) -> None:
    hub, plan = FakeHub(breaks_at="tokenizer.json"), planned(artifact)
    with pytest.raises(BackendError, match=r"ConnectionResetError: the line went dead\)\nhint: .*goes on where"):
        upload(plan, hub)
    assert "model.safetensors" in hub.files
    assert "config.json" not in hub.files
    upload(plan, hub)
    assert {**contents(artifact), ".gitattributes": hub.files[".gitattributes"]} == hub.files


def test_what_is_there_is_not_sent_again(artifact: Path) -> None:
    hub, plan = FakeHub(), planned(artifact)
    upload(plan, hub)
    sent = len(hub.commits)
    assert upload(plan, hub).was_complete
    assert len(hub.commits) == sent


def test_another_model_is_replaced_only_when_asked(artifact: Path) -> None:
    hub = FakeHub(files={"config.json": b"{}", "model-00009.safetensors": b"stale"}, private=True)
    with pytest.raises(UserError, match=r"another model \(2 files, model-00009.safetensors among them\); nothing was"):
        upload(planned(artifact), hub)
    assert not hub.commits
    upload(planned(artifact, replaces=True), hub)
    assert hub.commits[0] == ("delete", ["config.json", "model-00009.safetensors"])
    assert hub.files == contents(artifact)


def test_visibility_is_what_was_asked_for(artifact: Path) -> None:
    hub = FakeHub(private=False)
    with pytest.raises(UserError, match="repository is public, asked for was private; nothing was sent"):
        upload(planned(artifact), hub)
    assert not hub.files
    upload(planned(artifact, is_public=True), hub)
    other = FakeHub()
    upload(planned(artifact, is_public=True), other)
    assert other.private is False


@pytest.mark.parametrize("name", ["model.safetensors", "generation_config.json"])
def test_what_arrives_otherwise_is_found(name: str, artifact: Path) -> None:
    """A large file by its SHA-256, a small one by git's hash."""
    with pytest.raises(ArtifactError, match=f"{name}: other content on the hub"):
        upload(planned(artifact), FakeHub(spoils=name))


def test_what_does_not_verify_is_refused(artifact: Path) -> None:
    with (artifact / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last[0] ^ 1]))
    with pytest.raises(ArtifactError, match=r"files: model.safetensors: sha256"):
        planned(artifact)


def test_a_repository_has_two_names(artifact: Path) -> None:
    with pytest.raises(UserError, match="expected a repository, organization/name"):
        plan_upload(UploadRequest(artifact=artifact, repo="tiny", depth="none"))


def test_the_command(artifact: Path, capsys: Any, monkeypatch: Any) -> None:
    """A dry run asks no hub; without a login the hub's own word is passed on."""
    monkeypatch.setattr("huggingface_hub.HfApi", lambda **options: pytest.fail("the hub was asked"))
    dry = run(capsys, monkeypatch, "upload", artifact, REPO, "--dry-run", "--check", "none", "--json")
    assert dry.code == 0, dry.err
    told = json.loads(dry.out)
    assert (told["visibility"], set(told["files"])) == ("private", set(contents(artifact)))
    assert "commands in the card say FOLDER_OR_REPO" in dry.err
    assert "the card states no license" in dry.err

    hub = FakeHub()
    monkeypatch.setattr("huggingface_hub.HfApi", lambda **options: hub)
    sent = run(capsys, monkeypatch, "upload", artifact, REPO, "--check", "none", "--public")
    assert sent.code == 0, sent.err
    assert f"https://hub.test/{REPO}: {len(hub.files) - 1} files" in sent.out

    def nobody(*args: Any, **options: Any) -> None:
        from huggingface_hub.errors import LocalTokenNotFoundError

        raise LocalTokenNotFoundError("no token")

    hub.create_repo = nobody  # type: ignore[method-assign]
    refused = run(capsys, monkeypatch, "upload", artifact, REPO, "--check", "none")
    assert (refused.code, "hint: hf auth login" in refused.err) == (2, True)


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Any:
    """huggingface_hub's own client for a hub on this machine."""
    from huggingface_hub import HfApi, constants

    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return lambda url: HfApi(endpoint=url, token="hf_test")


@pytest.mark.filterwarnings("ignore:Use 'content:DeprecationWarning")  # the client's own
def test_the_real_client_over_http(artifact: Path, client: Any) -> None:
    request = UploadRequest(artifact=artifact, repo="me/it", depth="none")
    with hub_server() as hub:
        plan, api = plan_upload(request), client(hub.url)
        done = upload(plan, api)
        assert done.url == f"{hub.url}/me/it"
        assert hub.files == contents(artifact)
        assert hub.is_private is True
        assert hub.commits[-1] == sorted(LAST)
        assert upload(plan, api).was_complete

        hub.files["model-00002-of-00002.safetensors"] = b"stale"
        upload(plan_upload(replace(request, replaces=True)), api)
        assert hub.files == contents(artifact)

        hub.refuses = 403
        with pytest.raises(UserError, match=r"the hub refuses \(403: (.|\n)*hint: hf auth login"):
            upload(plan, api)


def test_a_hub_that_is_not_there(artifact: Path, client: Any) -> None:
    with hub_server() as hub:
        url = hub.url
    with pytest.raises(BackendError, match="cannot be reached"):
        upload(planned(artifact), client(url))
