"""The catalog of a state folder, without a server: what comes with the package and what was added."""

from __future__ import annotations

from toolserver.catalog.catalog import Catalog
from toolserver.settings import Settings
from toolserver.store import tool_images
from toolserver.store.connection import database_path
from toolserver.store.database import Database
from toolserver.store.tool_images import ToolImageRow


def known_catalog(settings: Settings, unusable: str | None = None) -> Catalog:
    """`unusable`: why no added image can be started. Raises StartRefused, StoreUnavailable. Makes no database where there is none."""
    catalog = Catalog.load(settings)
    catalog.take_up(stored_rows(settings), settings.tools, unusable)
    return catalog


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
