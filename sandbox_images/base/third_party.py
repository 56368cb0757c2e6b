"""Makes the installed packages importable in a process that was started without them (`-S`, for a quick start)."""

import sys


def enable() -> None:
    if sys.flags.no_site and "site-packages" not in "".join(sys.path):
        import site  # noqa: PLC0415 - what -S leaves out

        site.main()
