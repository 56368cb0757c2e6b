"""A session: what it was granted, the sandboxes it has, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

from toolserver.catalog.image import ToolImage
from toolserver.egress.policy import EgressPolicy, narrowed
from toolserver.errors import Code, RuntimeUnavailable, ToolServerError
from toolserver.runtime.base import Limits
from toolserver.sandbox.background import Background
from toolserver.sessions.box import Box

Cause = Literal["idle", "expired", "deleted", "oom", "node_lost", "shutdown"]


@dataclass(frozen=True)
class Ending:
    """Why and when (seconds since 1970) a session ended."""

    cause: str
    at: float
    successor: str | None = None  # the session that has its workspace

    def error(self, session_id: str) -> ToolServerError:
        when = iso_time(self.at)
        if self.successor is not None:
            message = (
                f"The session {session_id} is gone since {when}: its machine stopped while it was in use, so its last calls may have "
                f"run without a trace, and the last changes of its files may be missing. Its workspace is that of the session "
                f"{self.successor} now: look there before you repeat anything."
            )
            told = {"cause": self.cause, "ended_at": when, "successor": self.successor}
            return ToolServerError(Code.SESSION_GONE, message, extra=told, effects="possible")
        why = _WHY.get(self.cause, f"it ended ({self.cause})")
        message = f"The session {session_id} is gone since {when}: {why}. Create a new one with POST /v1/sessions."
        return ToolServerError(Code.SESSION_GONE, message, extra={"cause": self.cause, "ended_at": when})


_WHY = {
    "idle": "it was not used for its idle_s",
    "expired": "its ttl_s was over",
    "deleted": "it was deleted",
    "oom": "its sandbox ran out of memory",
    "node_lost": "its workspace was lost with the machine or the engine that held it",
    "shutdown": "the server was shut down",
}


def new_session_id() -> str:
    return f"ses_{secrets.token_hex(12)}"


def iso_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


@dataclass(frozen=True)
class Grant:
    """What a session may have and do, as it is in effect. Times in seconds. `doors`: by image, those to the egress proxy."""

    ttl_s: float
    idle_s: float
    images: tuple[str, ...]
    limits: Limits
    egress: EgressPolicy
    env: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    doors: Mapping[str, str] = field(default_factory=dict, repr=False)

    def dump(self) -> str:
        """As JSON, for the store."""
        return json.dumps({**asdict(self), "egress": self.egress.as_json()})

    @classmethod
    def load(cls, text: str) -> Grant:
        told = json.loads(text)
        egress = told["egress"]
        policy = EgressPolicy.load(
            {"mode": egress} if isinstance(egress, str) else egress
        )  # a mode alone: of version 1
        return cls(**{**told, "images": tuple(told["images"]), "limits": Limits(**told["limits"]), "egress": policy})


@dataclass
class Session:
    """Lives in the registry, which alone ends it. `started` and `last_used` are monotonic, `created_at` is for people."""

    session_id: str
    workspace_id: str
    tenant: str
    grant: Grant
    created_at: float
    started: float
    boxes: dict[str, Box]
    background: Background
    clock: Callable[[], float]
    last_used: float = 0.0
    busy: int = 0
    writers: int = 0  # uploads and the like; calls are counted by the executor
    restoring: bool = False
    regranting: asyncio.Lock = field(default_factory=asyncio.Lock)
    ending: Ending | None = None
    watchers: set[Callable[[Ending], None]] = field(default_factory=set)  # told once, when it ends

    @property
    def images(self) -> Collection[str]:
        return self.grant.images

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Use counts as activity from its beginning to its end. Raises session_gone in place of RuntimeUnavailable when it ended."""
        self.busy += 1
        try:
            yield
        except RuntimeUnavailable:
            self.check_live()  # what ended with the session is not away: it is gone
            raise
        finally:
            self.busy -= 1
            self.last_used = self.clock()

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Something changes files, so no restore may begin. Raises quota_exceeded while one is under way."""
        self.check_not_restoring()
        self.writers += 1
        try:
            yield
        finally:
            self.writers -= 1

    def check_not_restoring(self) -> None:
        """Raises quota_exceeded: a restore runs alone in its session."""
        if self.restoring:
            raise ToolServerError(
                Code.QUOTA_EXCEEDED,
                "The session's files are being restored to a snapshot, and nothing else may change them meanwhile. Try again in a moment.",
                retry_after_s=1,
            )

    def used_at(self, now: float) -> float:
        """When it was used last, as the clock tells: now while it is."""
        return now if self.busy else self.last_used

    def due(self, now: float) -> Cause | None:
        """Why it is to end at `now`, if it is."""
        if now - self.started >= self.grant.ttl_s:
            return "expired"
        if not self.busy and now - self.last_used >= self.grant.idle_s:
            return "idle"
        return None

    def check_live(self) -> None:
        """Raises session_gone."""
        if self.ending is not None:
            raise self.ending.error(self.session_id)

    def journalled(self, references: list[str]) -> dict[str, Any]:
        """What the journal keeps of its creation. Neither environment nor labels: they are the client's own."""
        return {
            "tenant": self.tenant,
            "session_id": self.session_id,
            "images": references,
            "limits": asdict(self.grant.limits),
            "egress": self.grant.egress.as_json(),
            "ttl_s": self.grant.ttl_s,
        }

    def as_json(self, isolation: dict[str, Any]) -> dict[str, Any]:
        """The session as clients see it. The environment is not shown: it may hold secrets."""
        limits = self.grant.limits
        return {
            "id": self.session_id,
            "state": "ready" if self.ending is None else "ended",
            "created_at": iso_time(self.created_at),
            "expires_at": iso_time(self.created_at + self.grant.ttl_s),
            "idle_s": self.grant.idle_s,
            "images": list(self.grant.images),
            "sandboxes": [told for box in self.boxes.values() if (told := box.as_json()) is not None],
            "labels": dict(self.grant.labels),
            "limits": {
                "memory_mb": limits.memory_mb,
                "cpus": limits.cpus,
                "pids": limits.pids,
                "disk_mb": limits.disk_mb,
            },
            "egress": self._egress(),
            "isolation": isolation,
        }

    def egress_of(self, image: ToolImage) -> EgressPolicy:
        """What sandboxes of an image may reach in this session."""
        return narrowed(self.grant.egress, image.egress)

    def _egress(self) -> dict[str, Any]:
        """`images`: those that get less than the session, and what."""
        policy = self.grant.egress
        less = {
            name: own.as_json() for name, box in self.boxes.items() if (own := self.egress_of(box.plan.image)) != policy
        }
        return {"mode": policy.mode, "allow": list(policy.allow), "images": less}
