"""Starts the egress proxy: `python3 -I [-S] .../sandbox_images/egress/proxy.py`, with the server on stdin and stdout."""

import sys
from pathlib import Path


def main() -> int:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from sandbox_images.base import third_party  # noqa: PLC0415 - the path comes first

    third_party.enable()
    from sandbox_images.egress.program import run  # noqa: PLC0415 - packages come first
    from sandbox_images.egress.vetting import System  # noqa: PLC0415

    return run(System())


if __name__ == "__main__":
    sys.exit(main())
