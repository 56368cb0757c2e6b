"""API keys. Only a digest is stored: a key has 256 random bits, so a plain hash of it can't be searched."""

from __future__ import annotations

import hashlib
import secrets
import time
from dataclasses import asdict, dataclass
from typing import Any

from sqlalchemy import Connection, select

from toolserver.store.schema import keys

SCOPES = ("read", "use", "admin")  # each holds those before it


@dataclass(frozen=True)
class Key:
    key_id: str
    name: str
    tenant: str
    scope: str
    created_at: float
    revoked_at: float | None = None

    def allows(self, scope: str) -> bool:
        return SCOPES.index(self.scope) >= SCOPES.index(scope)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def new_text() -> str:
    return f"tck_{secrets.token_urlsafe(32)}"


def create(connection: Connection, text: str, name: str, tenant: str, scope: str) -> Key:
    """Raises sqlalchemy's IntegrityError when that very key exists."""
    key = Key(f"key_{secrets.token_hex(6)}", name, tenant, scope, time.time())
    connection.execute(
        keys.insert().values(
            key_id=key.key_id, digest=digest(text), name=name, tenant=tenant, scopes=scope, created_at=key.created_at
        )
    )
    return key


def find(connection: Connection, text_digest: str) -> Key | None:
    """The key with that digest, if it was not revoked."""
    row = connection.execute(
        select(keys).where(keys.c.digest == text_digest, keys.c.revoked_at.is_(None))
    ).one_or_none()
    return None if row is None else Key(row.key_id, row.name, row.tenant, row.scopes, row.created_at)


def listing(connection: Connection) -> list[Key]:
    rows = connection.execute(select(keys).order_by(keys.c.created_at)).all()
    return [Key(r.key_id, r.name, r.tenant, r.scopes, r.created_at, r.revoked_at) for r in rows]


def revoke(connection: Connection, key_id: str) -> bool:
    """Whether there was such a key."""
    found = connection.execute(select(keys.c.key_id).where(keys.c.key_id == key_id)).one_or_none()
    connection.execute(
        keys.update().where(keys.c.key_id == key_id, keys.c.revoked_at.is_(None)).values(revoked_at=time.time())
    )
    return found is not None


def ensure(connection: Connection, text: str, name: str, tenant: str, scope: str) -> Key:
    """The key with this text, made if need be; one that was revoked counts again, since the operator names it at start."""
    row = connection.execute(select(keys).where(keys.c.digest == digest(text))).one_or_none()
    if row is None:
        return create(connection, text, name, tenant, scope)
    connection.execute(keys.update().where(keys.c.key_id == row.key_id).values(revoked_at=None, scopes=scope))
    return Key(row.key_id, row.name, row.tenant, scope, row.created_at)
