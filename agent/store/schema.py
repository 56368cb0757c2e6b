"""The tables of the PlanStore."""

from __future__ import annotations

from sqlalchemy import Column, Float, Integer, MetaData, String, Table, Text

metadata = MetaData()

runs = Table(
    "runs",
    metadata,
    Column("run_id", String(128), primary_key=True),
    Column("goal", Text, nullable=False),
    Column("state", String(16), nullable=False),
    Column("created_at", Float, nullable=False),
    Column("updated_at", Float, nullable=False),
    Column("events", Integer, nullable=False),
    # whoever appends must be the owner: a process that lost the run can't write into it
    Column("owner", String(64), nullable=False),
)

events = Table(
    "events",
    metadata,
    Column("run_id", String(128), primary_key=True),
    Column("seq", Integer, primary_key=True),
    Column("at", Float, nullable=False),
    Column("kind", String(32), nullable=False),
    Column("data", Text, nullable=False),
    Column("prev_hash", String(64), nullable=False),
    Column("hash", String(64), nullable=False),
)
