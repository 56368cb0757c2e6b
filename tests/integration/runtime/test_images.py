from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from toolserver.images import build
from toolserver.images.build import build_images, missing_images, optional_images
from toolserver.images.debs import cached_debs
from toolserver.images.definition import ImageBuildError, base_definition, launcher_definition, tool_definitions
from toolserver.images.engine import ImageEngine, _name_and_tag
from toolserver.images.wheels import cached_wheels


def test_every_tool_image_has_what_its_build_needs() -> None:
    tools = tool_definitions()
    assert {"workspace", "web"} <= set(tools)
    for definition in tools.values():
        files = definition.files()
        assert f"sandbox_images/{definition.name}/worker.py" in files
        assert "sandbox_images/base/mcp_stdio.py" in files
        assert definition.requirements or definition.debian_packages
    assert list(base_definition().files()) == ["Dockerfile"]
    assert set(launcher_definition().files()) == {"Dockerfile", "sandbox_images/launcher/launch.sh"}


def test_a_digest_changes_with_any_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolserver.images.definition.SOURCES", tmp_path)
    folder = tmp_path / "probe"
    folder.mkdir()
    (tmp_path / "base").mkdir()
    (folder / "Dockerfile").write_text("FROM x")
    (folder / "image.toml").write_text('name = "probe"\nreference = "toolcrib/probe"\n')
    definition = tool_definitions()["probe"]
    first = definition.digest()
    assert definition.digest() == first
    (folder / "tool.py").write_text("1")
    second = definition.digest()
    (folder / "tool.py").write_text("2")
    assert len({first, second, definition.digest()}) == 3


def test_the_context_tells_nothing_of_this_machine() -> None:
    definition = tool_definitions()["workspace"]
    with build._context(definition, None) as context, tarfile.open(fileobj=io.BytesIO(context.read())) as tar:
        members = tar.getmembers()
    assert {(m.uid, m.gid, m.uname, m.mtime) for m in members} == {(0, 0, "", build._EPOCH)}


def test_wheels_in_the_cache_are_not_fetched_again(tmp_path: Path) -> None:
    said: list[str] = []
    with pytest.raises(ImageBuildError):
        cached_wheels(["no-such package!"], "3.11", "x86_64", tmp_path, said.append)
    assert [p for p in tmp_path.iterdir() if p.is_dir()] == []
    assert len(said) == 1


def test_debian_packages_are_taken_from_the_cache_or_from_the_same_debian(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.freedesktop_os_release", lambda: {"VERSION_CODENAME": "noble"})
    with pytest.raises(ImageBuildError, match="only on Debian bookworm"):
        cached_debs(["some-browser"], "Package: base\n", tmp_path, print)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr("platform.freedesktop_os_release", lambda: {"VERSION_CODENAME": "bookworm"})
    with pytest.raises(ImageBuildError, match="apt-get could not fetch"):
        cached_debs(["there-is-no-such-package"], "", tmp_path, print)
    assert list(tmp_path.iterdir()) == []


def test_an_optional_image_is_built_only_when_it_is_asked_for() -> None:
    assert optional_images() == {"browser"}
    assert "chromium-headless-shell" in tool_definitions()["browser"].debian_packages


def test_an_unknown_image_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(ImageBuildError, match="workspace"):
        build_images(["wrokspace"])


def test_no_engine_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ImageBuildError, match="No Docker engine answers"):
        build_images(docker_host=f"unix://{tmp_path}/none.sock")


@pytest.mark.docker
def test_built_images_are_there_run_python_and_hold_their_packages() -> None:
    assert set(missing_images()) <= optional_images()
    with ImageEngine(None) as engine:
        tools = tool_definitions()
        assert engine.run(tools["workspace"].tagged, "import numpy, pandas, matplotlib; print('ok')").endswith("ok")
        assert engine.run(tools["web"].tagged, "import httpx, markdownify, bs4, pypdf; print('ok')").endswith("ok")
        assert (
            engine.run(tools["workspace"].tagged, "import os; print(os.getuid(), os.stat('/workspace').st_uid)")
            == "10001 10001"
        )


@pytest.mark.docker
def test_nothing_in_an_image_keeps_a_setuid_bit() -> None:
    code = (
        "import os, stat; print([os.path.join(d, f) for d, _, fs in os.walk('/usr') for f in fs "
        "if os.lstat(os.path.join(d, f)).st_mode & (stat.S_ISUID | stat.S_ISGID)])"
    )
    with ImageEngine(None) as engine:
        assert engine.run(tool_definitions()["workspace"].tagged, code) == "[]"


@pytest.mark.parametrize(
    ("reference", "name", "tag"),
    [
        ("mcp/time", "mcp/time", "latest"),
        ("mcp/time:1", "mcp/time", "1"),
        ("localhost:5000/time", "localhost:5000/time", "latest"),
        ("localhost:5000/time:1", "localhost:5000/time", "1"),
        ("mcp/time@sha256:00", "mcp/time", "sha256:00"),
    ],
)
def test_a_reference_is_a_name_and_a_tag(reference: str, name: str, tag: str) -> None:
    assert _name_and_tag(reference) == (name, tag)


@pytest.mark.docker
def test_what_an_image_says_of_itself() -> None:
    with ImageEngine(None) as engine:
        assert engine.describe("example.invalid/nobody/none:1") is None
        facts = engine.describe(tool_definitions()["workspace"].tagged)
    assert facts is not None
    assert facts.digest.startswith("sha256:")
    assert facts.entrypoint[0] == "python3"
    assert facts.user == "10001:10001"
    assert facts.working_dir == "/workspace"
    assert "PATH" in facts.env_names
    assert facts.size_bytes > 1 << 20
