"""`toolserver keys`: the API keys of a state folder."""

# ruff: noqa: PLC0415, PLR0917 - imports wait for their command; typer's options are parameters
from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolserver.commands.changes import change
from toolserver.commands.terminal import (
    ConfigOption,
    JsonOption,
    StateOption,
    fail,
    load_settings,
    show,
    table,
    warn,
    with_database,
)

if TYPE_CHECKING:
    from toolserver.store.keys import Key

app = typer.Typer(no_args_is_help=True, help="API keys of this server.")


@app.command("create")
def create(
    name: Annotated[str, typer.Argument(help="What it is for.")],
    tenant: Annotated[str, typer.Option(help="Whose sessions and calls it sees.")] = "default",
    scope: Annotated[
        str,
        typer.Option(help="metrics (only these), read, use or admin; of the latter three each holds those before it."),
    ] = "use",
    config: ConfigOption = None,
    state_dir: StateOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a key and print it. It is shown this once; the server stores only its digest."""
    from toolserver.store import keys

    if scope not in keys.SCOPES:
        fail(f"--scope is one of {', '.join(keys.SCOPES)}")
    if not 0 < len(name) <= 128 or not 0 < len(tenant) <= 64:
        fail("a name has 1 to 128 characters, a tenant 1 to 64")
    text = keys.new_text()
    key = change(
        load_settings(config, state_dir),
        lambda c: keys.create(c, text, name, tenant, scope),
        lambda made: ("key_created", keys.journalled(made)),
    )
    show(as_json, {**_key_json(key), "key": text}, lambda: [text])


def _key_json(key: Key) -> dict[str, Any]:
    from toolserver.sessions.session import iso_time

    revoked_at = None if key.revoked_at is None else iso_time(key.revoked_at)
    return {**key.as_json(), "created_at": iso_time(key.created_at), "revoked_at": revoked_at}


@app.command("list")
def listing(config: ConfigOption = None, state_dir: StateOption = None, as_json: JsonOption = False) -> None:
    """All keys, without their text."""
    from toolserver.store import keys
    from toolserver.store.connection import database_path

    settings = load_settings(config, state_dir)
    place = database_path(settings.state_dir)
    if not place.exists():
        warn(f"there is no server state in {place.parent} yet")
    found = with_database(settings, lambda d: d.run(keys.listing, writes=False)) if place.exists() else []
    rows = [["ID", "NAME", "TENANT", "SCOPE", "STATE"]]
    rows += [[k.key_id, k.name, k.tenant, k.scope, "revoked" if k.revoked_at is not None else "valid"] for k in found]
    show(as_json, {"keys": [_key_json(key) for key in found]}, lambda: table(rows))


@app.command("revoke")
def revoke(
    key_id: Annotated[str, typer.Argument(help="As `keys list` shows it.")],
    config: ConfigOption = None,
    state_dir: StateOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a key invalid; a running server refuses it within 2 seconds."""
    from toolserver.store import keys

    revoked = change(
        load_settings(config, state_dir),
        lambda c: keys.revoke(c, key_id),
        lambda key: ("key_revoked", keys.journalled(key)) if key is not None else None,
    )
    if revoked is None:
        fail(f"there is no key {key_id}; `toolserver keys list` shows them")
    show(as_json, {"key_id": key_id, "revoked": True}, lambda: [f"{key_id} is revoked"])
