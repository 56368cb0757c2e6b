"""Starts the `browser` tool image's server: `python3 -I [-S] .../sandbox_images/browser/worker.py`."""

import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main() -> int:
    sys.path.insert(0, str(HERE.parents[1]))
    from sandbox_images.base import processes  # noqa: PLC0415 - the path comes first
    from sandbox_images.base.call_tasks import Session, Tools  # noqa: PLC0415
    from sandbox_images.base.tool_server import ToolServer  # noqa: PLC0415

    processes.prctl(processes.PR_SET_DUMPABLE, 0)  # else a page that broke out of its process could speak for us
    processes.prctl(processes.PR_SET_CHILD_SUBREAPER, 1)
    root = os.environ.get("TOOLCRIB_WORKSPACE", "/workspace")

    def make_tools(_session: Session) -> Tools:
        from sandbox_images.browser.toolset import Toolset  # noqa: PLC0415 - at the first call

        return Toolset(root, HERE / "tools.json")

    return ToolServer("toolcrib-browser", HERE / "tools.json", make_tools, max_running=1).run()


if __name__ == "__main__":
    sys.exit(main())
