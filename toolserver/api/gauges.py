"""What the server shows of itself in `/metrics`, beside what is counted where it happens."""

from __future__ import annotations

from importlib.metadata import version

from toolserver.api.services import Services
from toolserver.calls.executor import Executor
from toolserver.sessions.pool import Pool
from toolserver.telemetry import process
from toolserver.telemetry.metrics import Metrics


def describe(metrics: Metrics, services: Services, executor: Executor) -> None:
    registry, readiness, streams = services.registry, services.readiness, services.streams
    metrics.counter("toolserver_calls_total", "Ended tool calls by tool and code (ok: a success).")
    metrics.histogram("toolserver_call_seconds", "Time of ended tool calls, from their admission to their outcome.")
    metrics.counter("toolserver_sandboxes_started_total", "Sandboxes started.")
    _describe_egress(metrics)
    _describe_pool(metrics, registry.pool)
    metrics.counter("toolserver_streamed_bytes_total", "Bytes of event streams.")
    metrics.gauge("toolserver_streams_open", "Event streams that are open now.", lambda: streams.open)
    listeners = services.listeners
    metrics.gauge(
        "toolserver_mcp_listeners_open", "Streams of /mcp for changes that are open now.", lambda: listeners.open
    )
    metrics.gauges("toolserver_sessions", "Sessions by state.", "state", registry.by_state)
    metrics.gauge("toolserver_calls_running", "Calls that run now.", lambda: len(executor.admission.held()))
    metrics.gauges(
        "toolserver_queue_waiting",
        "Requests that wait for room, by what for.",
        "queue",
        lambda: {"calls": len(executor.admission.queue), "sessions": len(registry.places.queue)},
    )
    metrics.gauge(
        "toolserver_outcomes_unwritten",
        "Ended calls whose outcome waits to be stored.",
        lambda: executor.stored.unwritten,
    )
    metrics.gauge(
        "toolserver_left_over",
        "Sandboxes and workspaces on the engine that are nobody's and not removed yet.",
        lambda: registry.left_over,
    )
    metrics.gauge(
        "toolserver_engine_up",
        "1 when the sandbox runtime answered when it was last asked.",
        lambda: readiness.engine_up,
    )
    metrics.gauge(
        "toolserver_store_up", "1 when the last write to the database was done.", lambda: services.database.ok
    )
    snapshots = services.snapshots
    metrics.gauge("toolserver_snapshots", "Snapshots that are kept.", lambda: snapshots.count)
    metrics.gauge("toolserver_snapshot_bytes", "What all snapshots take on the server's disk.", snapshots.disk_bytes)
    metrics.gauge(
        "toolserver_epoch", "How many times the server was started on its state folder.", lambda: registry.epoch
    )
    metrics.gauges("toolserver_info", "Version of the server.", "version", lambda: {version("toolcrib"): 1})
    metrics.gauge("process_resident_memory_bytes", "Resident memory of the server.", process.resident_bytes)
    metrics.gauge("process_open_fds", "Open files of the server.", process.open_files)
    metrics.gauge(
        "process_start_time_seconds", "When the server started, in seconds since 1970.", lambda: process.STARTED_AT
    )
    metrics.counter_of("process_cpu_seconds_total", "CPU time of the server.", process.cpu_seconds)


def _describe_egress(metrics: Metrics) -> None:
    metrics.counter("toolserver_egress_connections_total", "Connections that the egress proxy carried for sandboxes.")
    metrics.counter("toolserver_egress_bytes_total", "Bytes that it carried, up (from sandboxes) and down.")
    metrics.counter("toolserver_egress_denials_total", "Requests of sandboxes that it refused, by rule.")


def _describe_pool(metrics: Metrics, pool: Pool) -> None:
    metrics.counter("toolserver_pool_claims_total", "Sandboxes that sessions began with: warm (of the pool) or cold.")
    metrics.counter_of("toolserver_pool_failures_total", "Starts for the pool that failed.", lambda: pool.failures)
    metrics.gauge("toolserver_pool_ready", "Sandboxes that wait for a session.", pool.ready)
    metrics.gauge("toolserver_pool_wanted", "Sandboxes that ought to wait for one.", pool.wanted)
    metrics.gauge("toolserver_pool_starting", "Starts for the pool that go on now.", lambda: pool.starting is not None)
