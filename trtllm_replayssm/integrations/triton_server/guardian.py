# SPDX-License-Identifier: Apache-2.0
"""Ends a server whose launcher was killed, which nobody else would: it waits for connections that stay open for ever.

A program that needs Python alone: guardian.py PID SECONDS SHM FOLDER, as `Server` has them. Its standard input closes
when the launcher is gone; the server is told of that by the kernel and gets as long to finish what it runs as it would
from the launcher.
"""

import os
import select
import shutil
import signal
import sys
from pathlib import Path


def kill(group: int) -> None:
    """Ends what is left of a process group."""
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        pass


def clear(shm: str, folder: str) -> None:
    """Removes shared memory whose name begins with `shm`, and `folder`."""
    for path in Path("/dev/shm").glob(f"{shm}*"):
        path.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def main(pid: str, seconds: str, shm: str, folder: str) -> None:
    server = os.pidfd_open(int(pid))  # readable when it has ended
    sys.stdin.buffer.read()
    select.select([server], [], [], float(seconds))
    kill(int(pid))
    select.select([server], [], [])
    clear(shm, folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
