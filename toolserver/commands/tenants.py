"""`toolserver tenants`: what each tenant may have, beside what the settings say of all."""

# ruff: noqa: PLC0415, PLR0917 - imports wait for their command; typer's options are parameters
from __future__ import annotations

import time
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
    with_database,
)

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from toolserver.settings import Settings

app = typer.Typer(no_args_is_help=True, help="Tenants and their quotas.")
TenantArgument = Annotated[str, typer.Argument(help="The tenant's name, as `keys create --tenant` has it.")]
_NOTHING = "default"


def _number(name: str, text: str | None) -> float | None:
    """Of the option for this quota: a number above 0, or `default`."""
    if text is None or text == _NOTHING:
        return None
    try:
        value = float(text)
    except ValueError:
        value = 0
    if not 0 < value < 1e15:
        option = "--max-" + name.replace("_", "-")
        fail(f"{option} {text}: a quota is a number above 0, or {_NOTHING} for what the settings say")
    return value


def _quota(what: str) -> Any:
    return typer.Option(help=f"{what}; or {_NOTHING}: what the server's settings say.")


@app.command("set")
def set_(
    tenant: TenantArgument,
    max_sessions: Annotated[str | None, _quota("Sessions")] = None,
    max_calls: Annotated[str | None, _quota("Calls at a time")] = None,
    max_memory_mb: Annotated[str | None, _quota("MiB of memory granted to all of its sessions")] = None,
    max_disk_mb: Annotated[str | None, _quota("MiB of workspace granted to all of its sessions")] = None,
    max_cpu_s: Annotated[str | None, _quota("CPU seconds of its calls within tenant.cpu_window_h")] = None,
    config: ConfigOption = None,
    state_dir: StateOption = None,
    as_json: JsonOption = False,
) -> None:
    """Change those quotas that are named; a running server follows within a second."""
    from toolserver.store import tenants

    given = dict(zip(tenants.LIMITS, (max_sessions, max_calls, max_memory_mb, max_disk_mb, max_cpu_s), strict=True))
    limits = {name: _number(name, text) for name, text in given.items() if text is not None}
    whole: dict[str, float | None] = {
        name: value if value is None or name == "cpu_s" else int(value) for name, value in limits.items()
    }
    if not 0 < len(tenant) <= 64:
        fail("a tenant's name has 1 to 64 characters")
    if not whole:
        fail("name at least one quota to change, such as --max-sessions 10")
    if any(value == 0 for value in whole.values()):
        fail("a quota is 1 or more; to shut a tenant out, revoke its keys")
    settings = load_settings(config, state_dir)
    change(
        settings,
        lambda connection: tenants.change(connection, tenant, whole),
        lambda _row: ("tenant_changed", {"tenant": tenant, "quotas": whole}),
    )
    _show(settings, [tenant], as_json, one=True)


@app.command("list")
def listing(config: ConfigOption = None, state_dir: StateOption = None, as_json: JsonOption = False) -> None:
    """All tenants that have a key, a session, or quotas of their own."""
    _show(load_settings(config, state_dir), None, as_json)


@app.command("show")
def show_(
    tenant: TenantArgument, config: ConfigOption = None, state_dir: StateOption = None, as_json: JsonOption = False
) -> None:
    """One tenant: its quotas, which of them are its own, and what it has used."""
    _show(load_settings(config, state_dir), [tenant], as_json, one=True)


def _show(settings: Settings, names: list[str] | None, as_json: bool, *, one: bool = False) -> None:
    from toolserver.store import tenants

    found = with_database(
        settings, lambda d: d.run(lambda c: _told(c, settings, names or tenants.names(c)), writes=False)
    )
    heads = ["TENANT", "SESSIONS", "CALLS", "MEMORY_MB", "DISK_MB", "CPU_S"]
    rows = [heads, *([told["tenant"], *(_cell(told, name) for name in tenants.LIMITS)] for told in found)]
    show(as_json, found[0] if one else {"tenants": found}, lambda: table(rows))


def _cell(told: dict[str, Any], name: str) -> str:
    limit = told["quotas"][name]
    bound = "-" if limit is None else f"{limit:g}" + ("*" if name in told["own"] else "")
    used = told["used"].get(name)
    return bound if used is None else f"{round(used, 1):g} of {bound}"


def _told(connection: Connection, settings: Settings, names: list[str]) -> list[dict[str, Any]]:
    """What the database knows is used: live sessions, running calls, CPU time. Memory and disk are the running server's to count."""
    from dataclasses import asdict

    from toolserver.store import tenants
    from toolserver.tenants.quotas import TenantLimits

    defaults = TenantLimits.defaults(settings.session, settings.tenant)
    own = {row.tenant: row.limits for row in tenants.listing(connection)}
    used = tenants.used(connection, time.time() - settings.tenant.cpu_window_h * 3600)
    return [
        {
            "tenant": name,
            "quotas": asdict(defaults.changed(own.get(name, {}))),
            "own": [limit for limit, value in own.get(name, {}).items() if value is not None],
            "used": {what: counts.get(name, 0) for what, counts in used.items()},
        }
        for name in names
    ]
