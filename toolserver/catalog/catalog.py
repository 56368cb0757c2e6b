"""The catalog: what tools exist, found by name or by words."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from importlib.resources import files
from importlib.resources.abc import Traversable

from toolserver.catalog.image import Tool, ToolImage
from toolserver.catalog.manifest import ManifestProblem, load_image
from toolserver.catalog.search import nearest, rank
from toolserver.catalog.secret import SecretSource
from toolserver.catalog.session_tools import SESSION_TOOLS
from toolserver.errors import Code, ToolServerError
from toolserver.settings import Settings, WebSettings

BRAVE_KEY = "TOOLCRIB_WEB_BRAVE_API_KEY"


@dataclass(frozen=True)
class Catalog:
    """Read-only once loaded. The session tools (`session_tools.SESSION_TOOLS`) are no part of it: every session has them.

    problems: a sentence for each image that was refused, for the log and for `doctor`. absent: optional images that can't be
    started here now, with what the operator can do; they are not in `images`.
    """

    images: dict[str, ToolImage]
    problems: tuple[str, ...] = ()
    absent: dict[str, str] = field(default_factory=dict)

    @classmethod
    def load(cls, settings: Settings, root: Traversable | None = None) -> Catalog:
        """Read every folder of `root` that has an image.toml; by default the images that come with the package.

        A broken manifest costs its own image only: see `problems`.
        """
        images: dict[str, ToolImage] = {}
        problems: list[str] = []
        for folder in _image_folders(root or files("sandbox_images")):
            try:
                image = load_image(folder)
                _refuse_taken_names(image, images.values())
            except ManifestProblem as problem:
                problems.append(f"tool image {problem}")
                continue
            images[image.name] = _with_web_settings(image, settings.web) if image.name == "web" else image
        return cls(images, tuple(problems))

    def tools(self, images: Collection[str] | None = None) -> list[Tool]:
        """The tools of these images (None: of all), in the images' order. Unknown names are passed over."""
        return [
            tool for image in self.images.values() if images is None or image.name in images for tool in image.tools
        ]

    def find(self, name: str, images: Collection[str] | None = None) -> Tool:
        """The tool called exactly `name`. Raises ToolServerError TOOL_NOT_FOUND with `suggestions`, session tools among them."""
        tools = self.tools(images)
        for tool in tools:
            if tool.name == name:
                return tool
        near = nearest([tool.name for tool in (*tools, *SESSION_TOOLS)], name)
        shown = name if len(name) <= 80 else name[:80] + "…"
        advice = f"Did you mean {' or '.join(near[:3])}?" if near else "Ask for the list of tools to see what there is."
        raise ToolServerError(Code.TOOL_NOT_FOUND, f"There is no tool {shown!r}. {advice}", extra={"suggestions": near})

    def search(self, query: str, k: int, images: Collection[str] | None = None) -> list[Tool]:
        """At most `k` tools that fit the words of `query`, best first; none when nothing fits."""
        return rank(self.tools(images), query, k)


def _image_folders(root: Traversable) -> list[Traversable]:
    folders = [entry for entry in root.iterdir() if entry.is_dir() and (entry / "image.toml").is_file()]
    return sorted(
        folders, key=lambda entry: (entry.name != "workspace", entry.name)
    )  # the workspace's tools come first


def _refuse_taken_names(image: ToolImage, others: Iterable[ToolImage]) -> None:
    taken = {tool.name: other.name for other in others for tool in other.tools} | {
        tool.name: "the server" for tool in SESSION_TOOLS
    }
    for tool in image.tools:
        if tool.name in taken:
            raise ManifestProblem(
                f"{image.name}/tools.json: tool {tool.name} is there already, from {taken[tool.name]}"
            )


def _with_web_settings(image: ToolImage, web: WebSettings) -> ToolImage:
    """What the operator decided about the web goes along as environment; the key as a secret, bound late."""
    env = {
        "TOOLCRIB_WEB_SEARCH_PROVIDER": web.search_provider,
        "TOOLCRIB_WEB_SEARXNG_URL": web.searxng_url or "",
    }
    key = web.brave_api_key
    secrets = {} if key is None else {BRAVE_KEY: SecretSource.from_settings("web.brave_api_key", key)}
    return replace(image, env={**image.env, **{name: value for name, value in env.items() if value}}, secrets=secrets)
