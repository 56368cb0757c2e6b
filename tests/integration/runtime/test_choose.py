from __future__ import annotations

from pathlib import Path

import pytest

from toolserver.errors import RequirementMissing, RuntimeUnavailable
from toolserver.runtime.bubblewrap_runtime import BubblewrapRuntime
from toolserver.runtime.choose import choose_runtime, weaknesses
from toolserver.settings import RuntimeSettings


@pytest.mark.docker
async def test_auto_takes_an_engine_that_answers_and_has_nothing_to_warn_of(tmp_path: Path) -> None:
    runtime, weaker = await choose_runtime(RuntimeSettings(), "server", tmp_path)
    assert (runtime.name, weaker) == ("docker", None)
    await runtime.close()


@pytest.mark.bubblewrap
async def test_auto_falls_back_to_bubblewrap_and_says_what_is_weaker(tmp_path: Path) -> None:
    settings = RuntimeSettings(docker_host=f"unix://{tmp_path}/none.sock")
    runtime, weaker = await choose_runtime(settings, "server", tmp_path)
    assert runtime.name == "bubblewrap"
    assert weaker is not None
    assert "made by bubblewrap" in weaker
    await runtime.close()


async def test_auto_waits_for_an_engine_where_nothing_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def not_here(_: object) -> None:
        raise RuntimeUnavailable("There is no bubblewrap.")

    monkeypatch.setattr(BubblewrapRuntime, "check", not_here)
    settings = RuntimeSettings(docker_host=f"unix://{tmp_path}/none.sock")
    runtime, weaker = await choose_runtime(settings, "server", tmp_path)
    assert runtime.name == "docker"
    assert weaker is not None
    assert "There is no bubblewrap." in weaker
    with pytest.raises(RuntimeUnavailable):
        await runtime.check()
    await runtime.close()


@pytest.mark.parametrize("name", ["docker", "bubblewrap", "fake"])
async def test_a_named_runtime_is_taken_as_it_is(name: str, tmp_path: Path) -> None:
    runtime, weaker = await choose_runtime(RuntimeSettings.model_validate({"name": name}), "server", tmp_path)
    assert runtime.name == name
    assert (weaker is None) == (name == "docker")
    await runtime.close()


@pytest.mark.parametrize("name", ["bubblewrap", "fake"])
async def test_gvisor_that_is_required_is_never_replaced(name: str, tmp_path: Path) -> None:
    settings = {"isolation": "require-gvisor", "docker_host": f"unix://{tmp_path}/none.sock"}
    with pytest.raises(RequirementMissing, match="use docker"):
        await choose_runtime(RuntimeSettings.model_validate({**settings, "name": name}), "server", tmp_path)
    runtime, _ = await choose_runtime(RuntimeSettings.model_validate(settings), "server", tmp_path)
    assert runtime.name == "docker"
    await runtime.close()


@pytest.mark.bubblewrap
async def test_gvisor_that_is_only_preferred_is_missed_in_words(tmp_path: Path) -> None:
    settings = RuntimeSettings(name="bubblewrap", isolation="prefer-gvisor")
    runtime, _ = await choose_runtime(settings, "server", tmp_path)
    await runtime.open()
    assert any("gVisor is preferred" in line for line in weaknesses(runtime.isolation()))
    await runtime.close()
