"""Optional images are offered where they can be started: built on the engine, or with their programs on the host."""

from __future__ import annotations

from toolserver.catalog.catalog import Catalog
from toolserver.errors import RuntimeUnavailable
from toolserver.runtime.base import SandboxRuntime


class OptionalImages:
    """Moves them between the catalog's `images` and its `absent`. Until the first look all are offered."""

    def __init__(self, catalog: Catalog, runtime: SandboxRuntime) -> None:
        self._catalog, self._runtime = catalog, runtime
        self._images = {name: image for name, image in catalog.images.items() if image.optional}

    async def look(self) -> None:
        """While the runtime is away, all stays as it is."""
        for name, image in self._images.items():
            try:
                lacks = await self._runtime.lacks(name, image.reference, image.host_programs)
            except RuntimeUnavailable:
                return
            if lacks is None:
                self._catalog.absent.pop(name, None)
                self._catalog.images.setdefault(name, image)
            else:
                self._catalog.images.pop(name, None)
                self._catalog.absent[name] = lacks
