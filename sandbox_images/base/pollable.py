"""Whether a worker can be spoken to at all."""

from __future__ import annotations

import select


def pollable(fd: int) -> bool:
    """Whether it can be waited for: files and /dev/null can't."""
    poll = select.epoll()
    try:
        poll.register(fd)
    except OSError:
        return False
    finally:
        poll.close()
    return True
