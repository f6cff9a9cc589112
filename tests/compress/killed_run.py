"""Runs `octavo` and kills the process at its n-th act on the files below a folder.

Each line of standard input is a run, {"kill_at": n, "folder": ..., "arguments": [...]}; its answer is a line of
standard output, {"code": ..., "said": ...}, -SIGKILL when it was killed. A run is a fork of this process, which has
imported everything and computed nothing: a new interpreter would spend seconds on imports before its first act.
"""

import json
import os
import signal
import sys
import tempfile
import traceback
from typing import Any

WATCHED = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree")


def kill_at(number: int, folder: str) -> list[int]:
    """SIGKILL before the act is done; with 0, only count. What it returns holds the count."""
    count = [0]

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in WATCHED and str(arguments[0]).startswith(folder):
            count[0] += 1
            if count[0] == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    return count


def run(kill: int, folder: str, arguments: list[str]) -> int:
    """The run itself, in the child; its last line says how many acts there were."""
    from octavo.cli.main import main

    try:
        count = kill_at(kill, folder)
        code = main(arguments)
        print(f"acts: {count[0]}")
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def answer(job: dict[str, Any]) -> dict[str, Any]:
    """Fork, wait, and tell what came of it."""
    with tempfile.TemporaryFile() as said:
        child = os.fork()
        if child == 0:
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
            os._exit(run(job["kill_at"], job["folder"], job["arguments"]))
        _, status = os.waitpid(child, 0)
        said.seek(0)
        return {"code": os.waitstatus_to_exitcode(status), "said": said.read().decode()}


if __name__ == "__main__":
    import transformers.models.llama.modeling_llama  # noqa: F401 - all of these for the children

    import octavo.cli.compress
    import octavo.compress.job  # noqa: F401

    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)
