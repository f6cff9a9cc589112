"""Runs `octavo` and kills the process at its n-th act on the files below a folder: N FOLDER ARGUMENTS."""

import os
import signal
import sys
from typing import Any

WATCHED = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree")


def kill_at(number: int, folder: str) -> None:
    """SIGKILL before the act is done; with 0, only count, and say the count at the end."""
    count = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        if event in WATCHED and str(arguments[0]).startswith(folder):
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    if number == 0:
        import atexit

        atexit.register(lambda: print(f"acts: {count}"))


if __name__ == "__main__":
    kill_at(int(sys.argv[1]), sys.argv[2])
    from octavo.cli.main import main

    sys.exit(main(sys.argv[3:]))
