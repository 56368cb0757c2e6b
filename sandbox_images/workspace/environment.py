"""The environment that user code gets: nothing of the server's, nothing that opens a pager, an editor or a prompt."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping

KEPT = (
    "PATH",
    "HOME",
    "LANG",
    "LC_ALL",
    "TZ",
    "TMPDIR",
    "MPLCONFIGDIR",
    "LD_LIBRARY_PATH",
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
)
# what counts processors by itself is told; `nproc` looks at the first
COUNTS = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "RAYON_NUM_THREADS",
    "POLARS_MAX_THREADS",
    "GOMAXPROCS",
    "PYTHON_CPU_COUNT",
)
STARTUP = os.path.join(os.path.dirname(os.path.realpath(__file__)), "startup")  # holds what each Python runs first
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
QUIET = {
    "TERM": "dumb",
    "PAGER": "cat",
    "GIT_PAGER": "cat",
    "MANPAGER": "cat",
    "EDITOR": "true",
    "VISUAL": "true",
    "GIT_EDITOR": "true",
    "GIT_SEQUENCE_EDITOR": "true",
    "GIT_TERMINAL_PROMPT": "0",
    "DEBIAN_FRONTEND": "noninteractive",
    "PIP_NO_INPUT": "1",
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "NO_COLOR": "1",
}


def base_environment() -> dict[str, str]:
    """What every child gets before the session's own variables are bound."""
    kept = {name: os.environ[name] for name in KEPT if name in os.environ}
    path = kept.get("PATH", DEFAULT_PATH)
    own = os.path.dirname(sys.executable)
    if own and own not in path.split(":"):
        path = f"{own}:{path}"  # `python3` in the shell is the interpreter of python_execute
    defaults = {"HOME": "/tmp", "LANG": "C.UTF-8", "MPLCONFIGDIR": "/tmp/matplotlib"}
    return defaults | kept | QUIET | {"PATH": path, "PYTHONPATH": STARTUP}


def with_processors(environment: Mapping[str, str], cpus: float | None) -> dict[str, str]:
    """The same, with the share of the machine told to all that would start a thread for each of its processors."""
    if cpus is None:
        return dict(environment)
    count = str(max(1, min(math.ceil(cpus), len(os.sched_getaffinity(0)))))
    return {**environment, **dict.fromkeys(COUNTS, count)}


def with_session(environment: Mapping[str, str], bound: Mapping[str, str]) -> dict[str, str]:
    """The same with the session's own variables, which win. Its PYTHONPATH comes before ours."""
    whole = {**environment, **bound}
    if "PYTHONPATH" in bound:
        whole["PYTHONPATH"] = f"{bound['PYTHONPATH']}:{STARTUP}"
    return whole
