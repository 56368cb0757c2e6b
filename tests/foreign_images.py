"""Images that know nothing of Toolcrib, built by the engine for one test module."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import docker

from toolserver.images.definition import base_definition

BASE = base_definition().tagged


class ForeignImages:
    """Builds images of a Dockerfile's lines each, which `FROM base` and `FROM scratch` may begin; forgets them at the end."""

    def __init__(self, client: docker.APIClient) -> None:
        self._client = client
        self._made: list[str] = []

    def build(
        self, *lines: str, network: bool = False, files: Mapping[str, Path | str] | None = None, tag: str = ""
    ) -> str:
        """The image's id. `files` stand in the build's context by these names: files, folders, or texts themselves."""
        text = "\n".join(lines).replace("FROM base", f"FROM {BASE}")
        context = io.BytesIO()
        with tarfile.open(fileobj=context, mode="w") as tar:
            for name, content in {"Dockerfile": text, **(files or {})}.items():
                if isinstance(content, Path):
                    tar.add(content, name)
                else:
                    member = tarfile.TarInfo(name)
                    member.size = len(content.encode())
                    tar.addfile(member, io.BytesIO(content.encode()))
        context.seek(0)
        mode = "host" if network else "none"
        said = list(
            self._client.build(
                fileobj=context,
                custom_context=True,
                rm=True,
                forcerm=True,
                decode=True,
                network_mode=mode,
                tag=tag or None,
            )
        )
        problems = [line["error"] for line in said if "error" in line]
        assert not problems, problems
        image_id = str(next(line["aux"]["ID"] for line in reversed(said) if "aux" in line))
        self._made.append(image_id)
        return image_id

    def forget(self) -> None:
        for image_id in self._made:
            try:
                self._client.remove_image(image_id, force=True)
            except docker.errors.APIError:
                continue  # another one stands on it, or has it for its own


@contextmanager
def foreign_images() -> Iterator[ForeignImages]:
    client = docker.APIClient(version="auto", timeout=300)
    images = ForeignImages(client)
    try:
        yield images
    finally:
        images.forget()
        client.close()
