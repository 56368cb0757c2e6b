"""The tables, and the version of their shape. Types and statements that SQLite and PostgreSQL both know.

Times are seconds since 1970, as floats; JSON is text.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Float, Index, Integer, LargeBinary, MetaData, String, Table, Text

SCHEMA_VERSION = 3

metadata = MetaData()

meta = Table("meta", metadata, Column("name", String(64), primary_key=True), Column("value", Text, nullable=False))

keys = Table(
    "keys",
    metadata,
    Column("key_id", String(64), primary_key=True),
    Column("digest", String(64), nullable=False, unique=True),
    Column("name", String(128), nullable=False),
    Column("tenant", String(64), nullable=False),
    Column("scopes", String(128), nullable=False),  # separated by spaces
    Column("created_at", Float, nullable=False),
    Column("revoked_at", Float),
)

tenants = Table(  # bounds of their own; NULL: the server's settings hold
    "tenants",
    metadata,
    Column("tenant", String(64), primary_key=True),
    Column("max_sessions", Integer),
    Column("max_calls", Integer),
    Column("max_memory_mb", Integer),
    Column("max_disk_mb", Integer),
    Column("max_cpu_s", Float),
    Column("changed_at", Float, nullable=False),
)

sessions = Table(
    "sessions",
    metadata,
    Column("session_id", String(64), primary_key=True),
    Column("tenant", String(64), nullable=False),
    Column("created_at", Float, nullable=False),
    Column("ended_at", Float),  # NULL: live
    Column("cause", String(32)),
    Column("workspace_id", String(64)),  # NULL: made by version 1, which kept no session over a restart
    Column("grant_json", Text),  # what it was granted, its environment too; empty once it has ended
    Column("expires_at", Float),
    Column("last_used_at", Float),  # written now and then
    Column("used_in_boot", String(36)),  # boot of the machine whose calls may not be on the disk yet; NULL: all are
    Column("successor", String(64)),  # the session that has the workspace of this one, which ended
    Index("sessions_ended_at", "ended_at"),
)

sandboxes = Table(
    "sandboxes",
    metadata,
    Column("sandbox_id", String(64), primary_key=True),
    Column("session_id", String(64), nullable=False),
    Column("image", String(128), nullable=False),
    Column("handle", Text, nullable=False),  # for the runtime to find it again
    Column("spec", Text, nullable=False),
    Column("protocol", Text, nullable=False),  # what it speaks
    Column("generation", Integer, nullable=False),  # the how many-th sandbox of its image in its session, from 1
    Column("started_at", Float, nullable=False),
    Column("why_cold", Text),  # NULL: it came from the pool
    Index("sandboxes_session_id", "session_id"),
)

calls = Table(
    "calls",
    metadata,
    Column("tenant", String(64), primary_key=True),
    Column("call_id", String(128), primary_key=True),  # the Idempotency-Key where there was one
    Column("session_id", String(64), nullable=False),
    Column("tool", String(128), nullable=False),
    Column("request_hash", String(64), nullable=False),
    Column("trace_id", String(32), nullable=False),
    Column("created_at", Float, nullable=False),
    Column("ended_at", Float),  # NULL: running
    Column("status", Integer),
    Column("body", LargeBinary),
    Column("deadline_s", Float),
    Column("generation", Integer),  # the first of its image's sandboxes that it can have been sent to; NULL: any
    Column("cpu_ms", Float),
    Index("calls_ended_at", "ended_at"),
)

snapshots = Table(
    "snapshots",
    metadata,
    Column("tenant", String(64), primary_key=True),
    Column("session_id", String(64), primary_key=True),
    Column("snapshot_id", String(96), primary_key=True),
    Column("created_at", Float, nullable=False),
    Column("files", Integer, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("left_out", Integer, nullable=False),  # FIFOs, sockets, devices
    Column("session_ended_at", Float),  # NULL: it lives, as far as was looked
    Index("snapshots_by_id", "tenant", "snapshot_id"),
)

tool_images = Table(  # those that were added
    "tool_images",
    metadata,
    Column("name", String(64), primary_key=True),
    Column("entry", Text),  # NULL: it stands in the settings
    Column("added_at", Float, nullable=False),
    Column("reference", String(255)),  # these six: what was approved, NULL: nothing yet
    Column("digest", String(128)),
    Column("listed", Text),  # entries of `tools/list`
    Column("names", Text),  # what its tools are called here, by its own names
    Column("era", String(32)),
    Column("approved_at", Float),
    Column("drift", Text),  # what was found in place of what was approved, NULL: nothing else
)
