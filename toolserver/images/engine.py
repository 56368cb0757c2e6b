"""The part of the Docker engine that makes images: load, build, pull, ask. Blocking, for a command line or a thread."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

import docker
import docker.errors
import requests.exceptions
from docker.tls import TLSConfig
from docker.utils import kwargs_from_env

from toolserver.images.definition import ImageBuildError

Progress = Callable[[str], None]
QUICK_S, BUILD_S = 30, 1800
NO_ENGINE = "No Docker engine answers. Start one, or set TOOLSERVER_RUNTIME__DOCKER_HOST to where it listens."


@dataclass(frozen=True)
class ImageFacts:
    """What an image says of itself. `digest` is the engine's id of it, which a sandbox can be started from.

    `env_names` are of variables that it sets; their values may be anything. `volumes`: folders that it wants to write.
    """

    digest: str
    repo_digests: tuple[str, ...]
    labels: Mapping[str, str]
    entrypoint: tuple[str, ...]
    command: tuple[str, ...]
    env_names: tuple[str, ...]
    user: str
    working_dir: str
    volumes: tuple[str, ...]
    architecture: str
    size_bytes: int


class ImageEngine:
    """Raises ImageBuildError for whatever the engine says no to."""

    def __init__(self, docker_host: str | None) -> None:
        found = kwargs_from_env()
        tls, place = found.get("tls"), str(docker_host or found.get("base_url") or "unix:///var/run/docker.sock")
        try:
            if place.startswith("unix://"):
                # the SDK does not close a socket that could not connect, so it is tried first
                with socket.socket(socket.AF_UNIX) as trial:
                    trial.connect(place.removeprefix("unix://"))
            self._client = docker.APIClient(
                base_url=place,
                tls=tls if isinstance(tls, TLSConfig) else False,
                version="auto",
                timeout=QUICK_S,
            )
        except (docker.errors.DockerException, requests.exceptions.RequestException, OSError) as problem:
            raise ImageBuildError(NO_ENGINE) from problem

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def image(self, reference: str) -> dict[str, Any] | None:
        """What `docker image inspect` says, None when there is none."""
        try:
            found: dict[str, Any] = self._client.inspect_image(reference)  # type: ignore[no-untyped-call]
        except docker.errors.ImageNotFound:
            return None
        except (docker.errors.DockerException, requests.exceptions.RequestException) as problem:
            raise ImageBuildError(NO_ENGINE) from problem
        return found

    def labels(self, reference: str) -> dict[str, str]:
        found = self.image(reference) or {}
        return dict((found.get("Config") or {}).get("Labels") or {})

    def describe(self, reference: str) -> ImageFacts | None:
        """None when the engine does not have it. Raises ImageBuildError."""
        found = self.image(reference)
        if found is None:
            return None
        config: dict[str, Any] = found.get("Config") or {}
        return ImageFacts(
            digest=str(found["Id"]),
            repo_digests=tuple(found.get("RepoDigests") or ()),
            labels=dict(config.get("Labels") or {}),
            entrypoint=tuple(config.get("Entrypoint") or ()),
            command=tuple(config.get("Cmd") or ()),
            env_names=tuple(str(line).partition("=")[0] for line in config.get("Env") or ()),
            user=str(config.get("User") or ""),
            working_dir=str(config.get("WorkingDir") or "/"),
            volumes=tuple(sorted(config.get("Volumes") or {})),
            architecture=str(found.get("Architecture") or ""),
            size_bytes=int(found.get("Size") or 0),
        )

    def pull(self, reference: str, progress: Progress) -> bool:
        """False when it can't be had from where the engine looks."""
        name, tag = _name_and_tag(reference)
        try:
            for said in self._client.pull(name, tag=tag, stream=True, decode=True):
                if "error" in said:
                    progress(f"pull of {reference}: {said['error']}")
                    return False
        except (docker.errors.DockerException, requests.exceptions.RequestException) as problem:
            progress(f"pull of {reference}: {getattr(problem, 'explanation', problem)}")
            return False
        return True

    def load_root(self, tarball: Path, reference: str) -> None:
        """Make an image of one layer out of a root file system."""
        name, _, tag = reference.rpartition(":")
        try:
            answer = self._client.import_image_from_file(str(tarball), repository=name, tag=tag)
        except (docker.errors.DockerException, requests.exceptions.RequestException) as problem:
            raise ImageBuildError(f"The engine did not take the base image: {problem}") from problem
        if "error" in str(answer):
            raise ImageBuildError(f"The engine did not take the base image: {answer}")

    def build(
        self, context: IO[bytes], tagged: str, args: Mapping[str, str], labels: Mapping[str, str], progress: Progress
    ) -> str:
        """Build with the engine's classic builder, which every engine has; the new image's id."""
        self._client.timeout = BUILD_S
        before = (self.image(tagged) or {}).get("Id")
        try:
            said = self._client.build(
                fileobj=context,
                custom_context=True,
                tag=tagged,
                buildargs=dict(args),
                labels=dict(labels),
                rm=True,
                forcerm=True,
                decode=True,
            )
            made = _follow(said, tagged, progress)
            if before is not None and not before.endswith(made.removeprefix("sha256:")):
                self._forget(before)
            return made
        except (docker.errors.DockerException, requests.exceptions.RequestException) as problem:
            raise ImageBuildError(f"The engine stopped the build of {tagged}: {problem}") from problem
        finally:
            self._client.timeout = QUICK_S

    def _forget(self, image_id: str) -> None:
        """Remove the image that a new one took the tag of; not while a sandbox of it runs."""
        with contextlib.suppress(docker.errors.DockerException, requests.exceptions.RequestException):
            self._client.remove_image(image_id)

    def run(self, reference: str, code: str) -> str:
        """Output of a line of Python in a throw-away container without a network."""
        try:
            host = self._client.create_host_config(network_mode="none")
            made = self._client.create_container(
                reference, ["python3", "-I", "-c", code], host_config=host, entrypoint=[]
            )
            try:
                self._client.start(made["Id"])
                status = self._client.wait(made["Id"], timeout=QUICK_S)["StatusCode"]
                output = self._client.logs(made["Id"], stdout=True, stderr=True).decode("utf-8", "replace")
            finally:
                self._client.remove_container(made["Id"], force=True)
        except (docker.errors.DockerException, requests.exceptions.RequestException) as problem:
            raise ImageBuildError(f"{reference} can't run Python 3: {problem}") from problem
        if status != 0:
            raise ImageBuildError(f"{reference} can't run Python 3: {output.strip()}")
        return output.strip()


def _follow(said: Iterator[dict[str, Any]], tagged: str, progress: Progress) -> str:
    image_id, last = "", ""
    for message in said:
        if "error" in message:
            raise ImageBuildError(f"The build of {tagged} failed: {message['error'].strip()}\n{last}".rstrip())
        if "aux" in message:
            image_id = message["aux"].get("ID", image_id)
        text = message.get("stream", "").rstrip()
        if text:
            last = (last + "\n" + text)[-2000:]
            if text.startswith("Step "):
                progress(f"{tagged}: {text}")
    if not image_id:
        raise ImageBuildError(f"The engine ended the build of {tagged} without an image.\n{last}".rstrip())
    return image_id


def _name_and_tag(reference: str) -> tuple[str, str]:
    """A digest is what the engine takes for a tag; no tag is `latest`, since all of them are never meant."""
    if "@" in reference:
        name, _, digest = reference.partition("@")
        return name, digest
    name, colon, tag = reference.rpartition(":")
    return (name, tag) if colon and "/" not in tag else (reference, "latest")
