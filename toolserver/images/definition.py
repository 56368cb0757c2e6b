"""The images that come with Toolcrib, of tools and of what serves them: what goes into each, and a digest of it."""

from __future__ import annotations

import hashlib
import tomllib
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[2] / "sandbox_images"
BASE_REFERENCE, LAUNCHER_REFERENCE, EGRESS_REFERENCE = "toolcrib/base", "toolcrib/launcher", "toolcrib/egress"
IN_IMAGE = "sandbox_images"  # below /opt/toolcrib


class ImageBuildError(Exception):
    """An image could not be built. The message says why and what to do."""


@dataclass(frozen=True)
class ImageDefinition:
    """`folder` holds the Dockerfile and the image's own modules; `reference` has no tag. `optional`: built only when asked for."""

    name: str
    reference: str
    folder: Path
    optional: bool = False

    @property
    def tagged(self) -> str:
        return f"{self.reference}:{version('toolcrib')}"

    @property
    def requirements(self) -> list[str]:
        """Python packages that go into it, as pip takes them."""
        return _listed(self.folder / "requirements.txt")

    @property
    def debian_packages(self) -> list[str]:
        """Debian packages that go into it, beside those of the base."""
        return _listed(self.folder / "debian-packages.txt")

    def files(self) -> dict[str, Path]:
        """What the build context holds, by its name there."""
        found = {"Dockerfile": self.folder / "Dockerfile"}
        # the base has no code of ours: so a change of that costs one small layer of each image with Python code
        sources: list[Path] = []
        if self.name != "base":
            sources += self.folder.rglob("*")
            if any(self.folder.glob("*.py")):
                sources += [*(SOURCES / "base").glob("*.py"), *SOURCES.glob("*.py")]
        for path in sorted(sources):
            if path.is_file() and path.name != "Dockerfile" and path.suffix not in (".pyc", ".md"):
                found[f"{IN_IMAGE}/{path.relative_to(SOURCES).as_posix()}"] = path
        return found

    def digest(self) -> str:
        """Changes with anything that goes into the image, the packages' ranges included."""
        sha = hashlib.sha256(version("toolcrib").encode())
        for name, path in self.files().items():
            sha.update(f"\0{name}\0".encode() + path.read_bytes())
        return sha.hexdigest()[:24]


def _listed(file: Path) -> list[str]:
    if not file.is_file():
        return []
    lines = (line.split("#")[0].strip() for line in file.read_text("utf-8").splitlines())
    return [line for line in lines if line]


def base_definition() -> ImageDefinition:
    """The image that the others stand on."""
    return ImageDefinition("base", BASE_REFERENCE, SOURCES / "base")


def launcher_definition() -> ImageDefinition:
    """What is mounted in sandboxes of added images, to start them."""
    return ImageDefinition("launcher", LAUNCHER_REFERENCE, SOURCES / "launcher")


def egress_definition() -> ImageDefinition:
    """The egress proxy, and the forwarder in the sidecars of added images."""
    return ImageDefinition("egress", EGRESS_REFERENCE, SOURCES / "egress")


def definitions() -> dict[str, ImageDefinition]:
    """All that are built on the base, by name."""
    return {**tool_definitions(), "launcher": launcher_definition(), "egress": egress_definition()}


def tool_definitions() -> dict[str, ImageDefinition]:
    """Every folder with an image.toml and a Dockerfile, by name."""
    found = {}
    for manifest in sorted(SOURCES.glob("*/image.toml")):
        table = tomllib.loads(manifest.read_text("utf-8"))
        if (manifest.parent / "Dockerfile").is_file():
            found[table["name"]] = ImageDefinition(
                table["name"], table["reference"], manifest.parent, bool(table.get("optional"))
            )
    return found
