"""Puts the two pipes where Chromium expects them and becomes Chromium: `start_chromium.py READ WRITE PROGRAM ARGUMENTS…`."""

import os
import sys


def main() -> None:
    commands, answers = (os.dup(int(number)) for number in sys.argv[1:3])
    spare = [os.dup(descriptor) for descriptor in (commands, answers)]  # high enough to outlive what 3 and 4 were
    while min(spare) <= 4:
        spare = [os.dup(descriptor) for descriptor in spare]
    os.dup2(spare[0], 3)
    os.dup2(spare[1], 4)
    os.closerange(5, 256)
    os.execv(sys.argv[3], sys.argv[3:])


if __name__ == "__main__":
    main()
