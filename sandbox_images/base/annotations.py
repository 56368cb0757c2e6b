"""Names for annotations. The module `typing` is not loaded for them: that would cost each start of a process 3 ms."""

from __future__ import annotations

TYPE_CHECKING = False

if TYPE_CHECKING:
    from typing import Any, BinaryIO, Protocol
else:
    Any = BinaryIO = Protocol = object

__all__ = ["TYPE_CHECKING", "Any", "BinaryIO", "Protocol"]
