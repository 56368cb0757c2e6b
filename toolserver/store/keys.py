"""API keys. Only a digest is stored: a key has 256 random bits, so a plain hash of it can't be searched."""

from __future__ import annotations

import hashlib
import secrets
import time
from dataclasses import asdict, dataclass
from typing import Any

from sqlalchemy import Connection, select

from toolserver.store.schema import keys

SCOPES = ("metrics", "read", "use", "admin")
_HOLDS = {  # metrics are sums over all tenants, so a tenant's own keys don't open them
    "metrics": frozenset({"metrics"}),
    "read": frozenset({"read"}),
    "use": frozenset({"read", "use"}),
    "admin": frozenset(SCOPES),
}


@dataclass(frozen=True)
class Key:
    key_id: str
    name: str
    tenant: str
    scope: str
    created_at: float
    revoked_at: float | None = None

    def allows(self, scope: str) -> bool:
        return scope in _HOLDS[self.scope]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def journalled(key: Key) -> dict[str, Any]:
    """What the journal keeps of a key."""
    return {"tenant": key.tenant, "of_key": key.key_id, "name": key.name, "scope": key.scope}


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


def revoke(connection: Connection, key_id: str) -> Key | None:
    """The key, which is invalid from now on; None when there is none of that id."""
    row = connection.execute(select(keys).where(keys.c.key_id == key_id)).one_or_none()
    if row is None:
        return None
    revoked_at = row.revoked_at if row.revoked_at is not None else time.time()
    connection.execute(keys.update().where(keys.c.key_id == key_id).values(revoked_at=revoked_at))
    return Key(row.key_id, row.name, row.tenant, row.scopes, row.created_at, revoked_at)


def ensure(connection: Connection, text: str, name: str, tenant: str, scope: str) -> Key:
    """The key with this text, made if need be; one that was revoked counts again, since the operator names it at start."""
    row = connection.execute(select(keys).where(keys.c.digest == digest(text))).one_or_none()
    if row is None:
        return create(connection, text, name, tenant, scope)
    connection.execute(keys.update().where(keys.c.key_id == row.key_id).values(revoked_at=None, scopes=scope))
    return Key(row.key_id, row.name, row.tenant, scope, row.created_at)
