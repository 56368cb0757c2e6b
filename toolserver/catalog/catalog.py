"""The catalog: what tools exist, found by name or by words."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib.resources import files
from importlib.resources.abc import Traversable

from toolserver.catalog.added import AddedImage, Presence, drift_reason, load_added
from toolserver.catalog.image import Tool, ToolImage
from toolserver.catalog.manifest import ManifestProblem, load_image
from toolserver.catalog.nearest import nearest
from toolserver.catalog.search import ToolIndex
from toolserver.catalog.secret import SecretSource
from toolserver.catalog.session_tools import SESSION_TOOLS
from toolserver.errors import Code, ToolServerError
from toolserver.settings import Settings, WebSettings
from toolserver.store.tool_images import Drift, ToolImageRow
from toolserver.tool_entry import ToolEntry

BRAVE_KEY = "TOOLCRIB_WEB_BRAVE_API_KEY"


@dataclass(frozen=True)
class Catalog:
    """Read-only once loaded. The session tools (`session_tools.SESSION_TOOLS`) are no part of it: every session has them.

    problems: a sentence for each image that was refused, for the log and for `doctor`. absent: optional images that can't be
    started here now, with what the operator can do; they are not in `images`. added: what the operator added, those that are
    withheld too; `images` follows it, while the server runs.
    """

    images: dict[str, ToolImage]
    problems: tuple[str, ...] = ()
    absent: dict[str, str] = field(default_factory=dict)
    added: dict[str, AddedImage] = field(default_factory=dict)
    index: ToolIndex = field(default_factory=ToolIndex)

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
        if (withheld := self._withholding(name, images)) is not None:
            raise ToolServerError(
                Code.TOOL_NOT_FOUND,
                f"The tool {name} can't be called now. {withheld.reason}",
                extra={"suggestions": [], "image": withheld.name},
            )
        near = nearest([tool.name for tool in (*tools, *SESSION_TOOLS)], name)
        shown = name if len(name) <= 80 else name[:80] + "…"
        advice = f"Did you mean {' or '.join(near[:3])}?" if near else "Ask for the list of tools to see what there is."
        raise ToolServerError(Code.TOOL_NOT_FOUND, f"There is no tool {shown!r}. {advice}", extra={"suggestions": near})

    def search(self, query: str, k: int, images: Collection[str] | None = None) -> list[Tool]:
        """At most `k` tools that fit the words of `query`, best first; none when nothing fits."""
        return self.index.rank(self.tools(), query, k, images)

    def take_up(
        self, rows: Iterable[ToolImageRow], settings: Mapping[str, ToolEntry], presence: Presence | None = None
    ) -> set[str]:
        """Offer what was added, approved and can be started, and no more than that.

        The names of images whose sandboxes are not right any more.
        """
        builtin = [image for image in self.images.values() if image.name not in self.added]
        found = {one.name: one for one in load_added(rows, settings, builtin, presence or Presence())}
        before = {name: one.key() for name, one in self.added.items()}
        for name in self.added:
            self.images.pop(name, None)
        self.added.clear()
        self.added.update(found)
        self.images.update({name: one.image for name, one in found.items() if one.image is not None})
        after = {name: one.key() for name, one in found.items()}
        return {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}

    def withhold(self, name: str, drift: Drift) -> str | None:
        """Offer its tools no more, since it is not what was approved; why, or None when it is not offered anyway."""
        one = self.added.get(name)
        if one is None or one.row is None or one.image is None:
            return None if one is None else one.reason
        row = replace(one.row, drift=drift)
        changed = replace(one, row=row, state="changed", image=None, reason=drift_reason(name, row))
        self.added[name] = changed
        self.images.pop(name, None)
        return changed.reason

    def withheld(self) -> list[AddedImage]:
        return [one for one in self.added.values() if one.image is None]

    def _withholding(self, name: str, images: Collection[str] | None) -> AddedImage | None:
        return next(
            (one for one in self.withheld() if (images is None or one.name in images) and name in one.names.values()),
            None,
        )


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
