"""Out of a store into a sandbox: the worker is given the manifest, and asks for the pieces that it lacks."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from toolserver.errors import SandboxGone
from toolserver.sandbox import worker_snapshots
from toolserver.sandbox.stdio_client import RpcError
from toolserver.sandbox.worker_snapshots import Restoring
from toolserver.sessions.files import client_of
from toolserver.sessions.session import Session
from toolserver.snapshots.taking import shares_files
from toolserver.snapshots.told import damaged
from toolserver.store.blobs import BlobStore, Damaged


async def put_back(session: Session, store: BlobStore, snapshot_id: str, data: bytes) -> dict[str, Any] | None:
    """None when something changed the files while they were put in place."""
    restoring = await worker_snapshots.begin_restore(await client_of(session), full=shares_files(session))
    ended = False
    try:
        await _stage(restoring, store, snapshot_id, data)
        ended = True  # a commit closes it, whatever comes of it
        done = await restoring.commit()
    except RpcError as problem:
        if problem.kind == "changing":
            return None
        raise
    finally:
        if not ended:
            with contextlib.suppress(RpcError, SandboxGone, TimeoutError):
                await restoring.close()
    names = ("exact", "differs", "written", "removed")
    return {name: done.get(name) for name in names}


async def _stage(restoring: Restoring, store: BlobStore, snapshot_id: str, data: bytes) -> None:
    await restoring.manifest(data)
    lack = await restoring.step([])
    while lack:
        try:
            pieces = await asyncio.to_thread(lambda names: [store.get(name) for name in names], lack)
        except Damaged as problem:
            raise damaged(snapshot_id) from problem
        lack = await restoring.step(pieces)
