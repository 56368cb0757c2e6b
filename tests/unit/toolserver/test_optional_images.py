"""Optional images are offered where they can be started, and the others say what to do."""

from __future__ import annotations

from pathlib import Path

from tests.unit.toolserver.crib import Crib, detail
from toolserver.catalog.catalog import Catalog
from toolserver.errors import RuntimeUnavailable
from toolserver.runtime.bubblewrap_runtime import BubblewrapRuntime
from toolserver.runtime.fake_runtime import FakeRuntime
from toolserver.sessions.optional_images import OptionalImages
from toolserver.settings import RuntimeSettings, Settings


class Without(FakeRuntime):
    said: str | None = "The image browser is not built here. The operator can build it: toolserver images build browser"
    away = False

    async def lacks(self, image: str, reference: str, host_programs: tuple[str, ...]) -> str | None:
        del image, reference, host_programs
        if self.away:
            raise RuntimeUnavailable("away")
        return self.said


async def test_an_image_comes_and_goes_with_what_it_needs(tmp_path: Path) -> None:
    catalog, runtime = Catalog.load(Settings()), Without("server", tmp_path, RuntimeSettings())
    optional = OptionalImages(catalog, runtime)
    await optional.look()
    assert list(catalog.images) == ["workspace", "web"]
    assert catalog.absent == {"browser": runtime.said}
    assert not any(tool.name.startswith("browser_") for tool in catalog.tools())
    runtime.said = None
    await optional.look()
    assert "browser" in catalog.images
    assert catalog.absent == {}
    runtime.said, runtime.away = "not built", True
    await optional.look()  # an engine that does not answer changes nothing
    assert "browser" in catalog.images


async def test_a_session_that_names_an_absent_image_is_told_how_to_get_it(crib: Crib) -> None:
    crib.server.catalog.absent["browser"] = "Build it: toolserver images build browser"
    answer = await crib.client.post("/v1/sessions", json={"images": ["browser"]})
    assert detail(answer, 422, "invalid_arguments")["errors"] == [
        {"pointer": "/images/0", "message": crib.server.catalog.absent["browser"]}
    ]


async def test_bubblewrap_names_the_program_and_its_package(tmp_path: Path) -> None:
    runtime = BubblewrapRuntime("server", tmp_path, RuntimeSettings())
    assert await runtime.lacks("browser", "toolcrib/browser", ("/bin/sh",)) is None
    said = await runtime.lacks("browser", "toolcrib/browser", ("/usr/lib/none/some-browser",))
    assert said is not None
    assert "apt-get install some-browser" in said
