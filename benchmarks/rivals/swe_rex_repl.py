"""SWE-ReX with state: an interactive Python in its shell session."""

from __future__ import annotations

from swe_rex import Repl as Rival

__all__ = ["Rival"]
