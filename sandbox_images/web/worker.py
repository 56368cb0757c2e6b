"""Starts the `web` tool image's server: `python3 -I [-S] .../sandbox_images/web/worker.py`.

Isolated mode leaves the script's folder off the module path, so the root of the images is put there first. Third-party
packages come in at the first call that needs them: the answer to `initialize` must not wait for them.
"""

import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main() -> int:
    sys.path.insert(0, str(HERE.parents[1]))
    from sandbox_images.base.call_tasks import Session, Tools  # noqa: PLC0415 - the path comes first
    from sandbox_images.base.tool_server import ToolServer  # noqa: PLC0415
    from sandbox_images.web import settings  # noqa: PLC0415

    operators = settings.read(os.environ)

    def make_tools(session: Session) -> Tools:
        from sandbox_images.base import third_party  # noqa: PLC0415 - a few hundred milliseconds, at the first call

        third_party.enable()
        from sandbox_images.web.toolset import Toolset  # noqa: PLC0415 - needs what was enabled

        return Toolset(lambda: operators.bound(session.env))

    return ToolServer("toolcrib-web", HERE / "tools.json", make_tools).run()


if __name__ == "__main__":
    sys.exit(main())
