"""Starts the `web` tool image's server: `python3 -I [-S] .../sandbox_images/web/worker.py`.

Isolated mode leaves the script's folder off the module path, so the root of the images is put there first. Third-party
packages come in at the first call that needs them: the answer to `initialize` must not wait for them.
"""

import sys
from pathlib import Path


def main() -> int:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from sandbox_images.web.server import run  # noqa: PLC0415 - the path comes first

    return run()


if __name__ == "__main__":
    sys.exit(main())
