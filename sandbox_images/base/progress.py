"""How far a call has come: what `toolcrib/peek` shows, and what is left of a call that was stopped."""

from dataclasses import dataclass


@dataclass
class Progress:
    note: str = "Not begun yet"
