"""Where a tool image's secrets come from. A source is stored and shown; its value is read when a sandbox starts, and is neither."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from typing import Literal

from pydantic import SecretStr

from toolserver.errors import RuntimeUnavailable

MAX_SECRET_BYTES = 64 << 10
_FORMS = "file:PATH (absolute) or env:VARIABLE"


class SecretMissing(RuntimeUnavailable):
    """A secret's source can't be read now. The message names the source, never a value."""


@dataclass(frozen=True)
class SecretSource:
    """`place` is a path for `file`, a variable's name for `env`; `settings` has the value from the server's own settings."""

    kind: Literal["file", "env", "settings"]
    place: str
    given: SecretStr | None = field(default=None, repr=False)

    @classmethod
    def parse(cls, text: str) -> SecretSource:
        """Of `file:PATH` or `env:VARIABLE`. Raises ValueError with a sentence that does not repeat the text: it may be a secret."""
        kind, colon, place = text.partition(":")
        if colon and kind == "file" and place.startswith("/") and "\0" not in place:
            return cls("file", place)
        if colon and kind == "env" and place.isidentifier() and place.isascii():
            return cls("env", place)
        raise ValueError(f"The source of a secret is {_FORMS}; a value itself is never given.")

    @classmethod
    def from_settings(cls, name: str, value: SecretStr) -> SecretSource:
        return cls("settings", name, value)

    def __str__(self) -> str:
        return f"{self.kind}:{self.place}"

    def read(self) -> str:
        """The value, without the line end that files have. Raises SecretMissing. Blocks for a small file."""
        if self.given is not None:
            return self.given.get_secret_value()
        value = os.environ.get(self.place) if self.kind == "env" else self._read_file()
        if value is None:
            raise SecretMissing(
                f"The secret {self} is not there: the environment of this process has no such variable. The server needs it, "
                "and so does each command that starts the image (tools add, check, approve)."
            )
        if not value:
            raise SecretMissing(f"The secret {self} is empty.")
        if "\0" in value or "\n" in value or "\r" in value:
            raise SecretMissing(f"The secret {self} holds line breaks or NUL: it has to be one line of text.")
        return value

    def _read_file(self) -> str:
        try:
            handle = os.open(
                self.place, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
            )  # a FIFO must not hold up the server
            with os.fdopen(handle, "rb") as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise SecretMissing(f"The secret {self} can't be read: it is no regular file.")
                data = file.read(MAX_SECRET_BYTES + 1)
        except OSError as problem:
            raise SecretMissing(f"The secret {self} can't be read: {problem.strerror}.") from problem
        if len(data) > MAX_SECRET_BYTES:
            raise SecretMissing(f"The secret {self} is larger than {MAX_SECRET_BYTES} bytes.")
        try:
            return data.decode().removesuffix("\n").removesuffix("\r")
        except UnicodeDecodeError as problem:
            raise SecretMissing(f"The secret {self} is not UTF-8 text.") from problem


@dataclass(frozen=True)
class HeaderSecret:
    """Put by the egress proxy into requests to exactly `host`, so that the sandbox never has it. `prefix`: such as `Bearer `."""

    host: str
    header: str
    source: SecretSource
    prefix: str = ""
