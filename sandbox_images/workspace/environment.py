"""The environment that user code gets: nothing of the server's, nothing that opens a pager, an editor or a prompt."""

from __future__ import annotations

import os
import sys

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
    return defaults | kept | QUIET | {"PATH": path}
