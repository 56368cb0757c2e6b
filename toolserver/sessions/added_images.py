"""Added images while the server runs: taken up when the operator changes them, taken out when they are not what was approved."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from toolserver.catalog.added import Presence, in_engine, references
from toolserver.catalog.catalog import Catalog
from toolserver.catalog.offered import changes, pin
from toolserver.errors import RuntimeUnavailable, StartRefused, StoreUnavailable
from toolserver.journal.journal import Journal
from toolserver.sessions.registry import Registry
from toolserver.store import tool_images
from toolserver.store.connection import database_path
from toolserver.store.database import Database
from toolserver.store.tool_images import Drift, ToolImageRow
from toolserver.tool_entry import ToolEntry

_IDS_S = 15.0  # between two looks at what the engine has
_log = logging.getLogger(__name__)


class AddedImages:
    """`attach` a registry before its sandboxes start, `begin` before sessions are taken over, `close` at the end."""

    def __init__(
        self,
        catalog: Catalog,
        database: Database,
        journal: Journal,
        settings: Mapping[str, ToolEntry],
        *,
        unusable: str | None = None,
        elsewhere: Path | None = None,
    ) -> None:
        """`unusable`: why none can be started here. `elsewhere`: the state folder that they were added to, when it is another
        one than the server's: its database is used in place of `database`, also to note what drifted.
        """
        self._catalog, self._journal, self._settings = catalog, journal, settings
        self._database: Database | None = database if elsewhere is None else None
        self._elsewhere = elsewhere
        self._presence = Presence(unusable)
        self._registry: Registry | None = None
        self._version = -1
        self._rows: list[ToolImageRow] = []
        self._next_ids = 0.0

    def attach(self, registry: Registry) -> None:
        self._registry = registry

    def begin(self) -> None:
        """Take up what there is. Raises StartRefused, StoreUnavailable."""
        if self._elsewhere is not None:
            self._database = _opened(self._elsewhere)
        version = 0
        if self._database is not None:
            version, self._rows = self._database.run(
                lambda c: (tool_images.version(c), tool_images.listing(c)), writes=False
            )
        self._take_up(version)

    def close(self) -> None:
        if self._elsewhere is not None and self._database is not None:
            self._database.close()
            self._database = None

    async def look(self) -> None:
        """Whether the operator or the engine changed something, and take it up. While either is away all stays as it is."""
        if self._database is None:
            return
        try:
            version = await self._database.read(tool_images.version)
            changed = version != self._version
            if changed:
                self._rows = await self._database.read(tool_images.listing)
        except StoreUnavailable as problem:
            _log.warning("tool_images_not_read", extra={"fields": {"problem": str(problem)}})
            return
        presence = self._presence
        if changed or time.monotonic() >= self._next_ids:
            self._next_ids = time.monotonic() + _IDS_S
            presence = await self._ask_engine()
        if changed or presence != self._presence:
            for name in presence.moved.keys() - self._presence.moved.keys():
                _log.warning("tool_image_moved", extra={"fields": {"image": name, "message": presence.moved[name]}})
            self._presence = presence
            self._take_up(version)

    async def _ask_engine(self) -> Presence:
        if self._presence.unusable is not None or self._registry is None or not self._rows:
            return self._presence
        try:
            return in_engine(self._rows, await self._registry.runtime.image_ids(references(self._rows)))
        except RuntimeUnavailable:
            return self._presence

    def _take_up(self, version: int) -> None:
        changed = self._catalog.take_up(self._rows, self._settings, self._presence)
        self._version = version
        for name in sorted(changed):
            one = self._catalog.added.get(name)
            fields = {"image": name, "state": "removed" if one is None else one.state}
            if one is not None and one.reason is not None:
                fields["reason"] = one.reason
            _log.info("tool_image", extra={"fields": fields})
        if self._registry is not None:
            self._registry.follow_catalog(changed)

    def seen(self, name: str, listed: list[dict[str, Any]]) -> str | None:
        """Told of what a sandbox of an added image offers. Why it must not be used, if it must not: it is not what was approved."""
        one = self._catalog.added.get(name)
        if one is None:
            return None if name in self._catalog.images else f"The image {name} was removed."
        approval = one.row.approval if one.row is not None else None
        if approval is None or one.image is None:
            return one.reason
        if pin(listed) == pin(approval.listed):
            return None
        drift = Drift(listed=listed)
        self._rows = [replace(row, drift=drift) if row.name == name else row for row in self._rows]
        reason = self._catalog.withhold(name, drift)
        fields = {"image": name, **changes(approval.listed, listed)}
        _log.warning("tool_list_changed", extra={"fields": fields})
        self._journal.append_surely("tool_image_changed", **fields)
        if self._registry is not None:
            self._registry.follow_catalog({name})
            self._registry.background.spawn(
                self._note(lambda c: tool_images.note_drift(c, name, drift)), f"note the drift of {name}"
            )
        return reason

    def learned(self, name: str, era: str) -> None:
        """Told of the version of MCP that an image speaks."""
        if self._registry is not None and name in self._catalog.added:
            self._registry.background.spawn(
                self._note(lambda c: tool_images.learn_era(c, name, era)), f"note the era of {name}"
            )

    async def _note(self, job: Any) -> None:
        if self._database is None:
            return
        try:
            await self._database.write(job)
        except StoreUnavailable as problem:
            _log.warning("tool_image_not_noted", extra={"fields": {"problem": str(problem)}})


def _opened(state_dir: Path) -> Database | None:
    """The database of another state folder; None where there is none, and none is made. Raises StartRefused."""
    path = database_path(state_dir)
    try:
        if not path.exists():
            return None
    except OSError as problem:
        raise StartRefused(f"The state folder of the added images can't be used: {problem}.") from problem
    database = Database(path)
    database.open()
    return database
