"""The catalog of a state folder, without a server: what comes with the package and what was added."""

from __future__ import annotations

from toolserver.catalog.added import Presence, in_engine, references
from toolserver.catalog.catalog import Catalog
from toolserver.images.definition import ImageBuildError
from toolserver.images.engine import ImageEngine
from toolserver.settings import Settings
from toolserver.store import tool_images
from toolserver.store.connection import database_path
from toolserver.store.database import Database
from toolserver.store.tool_images import ToolImageRow


def known_catalog(settings: Settings, unusable: str | None = None) -> Catalog:
    """`unusable`: why no added image can be started. An engine that does not answer is passed over. Makes no database where there
    is none. Raises StartRefused, StoreUnavailable.
    """
    catalog = Catalog.load(settings)
    rows = stored_rows(settings)
    catalog.take_up(rows, settings.tools, Presence(unusable) if unusable else _presence(settings, rows))
    return catalog


def _presence(settings: Settings, rows: list[ToolImageRow]) -> Presence:
    if not rows or settings.runtime.name in ("bubblewrap", "fake"):
        return Presence()
    try:
        with ImageEngine(settings.runtime.docker_host) as engine:
            found = {name: engine.image(name) for name in references(rows)}
    except ImageBuildError:
        return Presence()
    return in_engine(rows, {name: str(facts["Id"]) for name, facts in found.items() if facts is not None})


def stored_rows(settings: Settings) -> list[ToolImageRow]:
    """Raises StartRefused, StoreUnavailable."""
    path = database_path(settings.state_dir)
    if not path.exists():
        return []
    database = Database(path)
    try:
        database.open()
        return database.run(tool_images.listing, writes=False)
    finally:
        database.close()
