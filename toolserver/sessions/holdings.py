"""What the server holds on its engine, so that a reconcile can tell what is nobody's.

An id is entered before the engine hears of it and leaves only when the engine has let go of it, or could not. So whatever an
inventory shows that is not entered at a later moment belongs to nobody, however many starts and claims are under way.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from toolserver.runtime.base import Inventory


@dataclass
class Holdings:
    """Ids of sandboxes and workspaces, those of sessions and of the pool alike."""

    sandboxes: set[str] = field(default_factory=set)
    workspaces: set[str] = field(default_factory=set)

    def orphans(self, found: Inventory) -> tuple[frozenset[str], frozenset[str]]:
        """Of what an inventory found, begun before now: the sandboxes and the workspaces that are nobody's."""
        return found.sandboxes - self.sandboxes, found.workspaces - self.workspaces
