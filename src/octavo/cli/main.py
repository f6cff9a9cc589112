"""The `octavo` command: finds the command's file, builds its settings, runs it, and turns errors into exit codes.

Only the file of the command that was asked for is imported, so `octavo --help` needs neither torch nor a server.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from octavo.errors import OctavoError
from octavo.settings_parser import SettingsParser, UsageError

# command -> (module, one line of help). A command of two words is a group and what it does.
COMMANDS: dict[str, tuple[str, str]] = {
    "quickstart": (
        "octavo.cli.quickstart",
        "run the whole loop on the demo model: compress, serve, load, evaluate, decide",
    ),
    "serve": ("octavo.cli.serve", "serve a model over the OpenAI HTTP API"),
    "chat": ("octavo.cli.chat", "talk to a server, or to a model loaded on the spot"),
    "compress": ("octavo.cli.compress", "quantize a model into a compressed-tensors checkpoint"),
    "convert": ("octavo.cli.convert", "write any readable checkpoint (GGUF too) as plain safetensors"),
    "bench": ("octavo.cli.bench", "load a server and judge it against an objective"),
    "eval perplexity": ("octavo.cli.eval_perplexity", "perplexity of a model on a text, with its uncertainty"),
    "plan kv": ("octavo.cli.plan_kv", "memory that the KV cache of a model needs"),
    "plan memory": ("octavo.cli.plan_memory", "memory that the weights need at each width, and how many accelerators"),
    "info": ("octavo.cli.info", "versions, devices, and which kernel serves each operation"),
}

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0 done, 1 failed, 2 called wrongly, 130 interrupted."""
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words or os.environ.get("OCTAVO_DEBUG", "0") not in ("", "0")
    try:
        code = _dispatch(words)
        sys.stdout.flush()  # a closed pipe shows here rather than while Python exits
        return code
    except UsageError as error:
        return _report(error, f"octavo: error: {error}", EXIT_USAGE, debug)
    except OctavoError as error:
        return _report(error, f"octavo: error: {error}", EXIT_FAILED, debug)
    except KeyboardInterrupt:
        print("octavo: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of our output went away, as in `octavo plan kv demo | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    except OSError as error:
        return _report(error, f"octavo: error: {error}", EXIT_FAILED, debug)
    except Exception as error:
        text = f"octavo: unexpected {type(error).__name__}: {error}\nRun it again with --debug for the traceback."
        return _report(error, text, EXIT_FAILED, debug)


def _report(error: BaseException, text: str, code: int, debug: bool) -> int:
    if debug:
        import traceback

        traceback.print_exception(error)
    print(text, file=sys.stderr)
    return code


def _dispatch(words: list[str]) -> int:
    words = [w for w in words if w != "--debug"] if words[:1] == ["--debug"] else words
    if not words or words[0] in ("-h", "--help", "help"):
        print(overview())
        return EXIT_OK if words else EXIT_USAGE
    if words[0] in ("--version", "-V", "version"):
        from octavo.version import __version__

        print(f"octavo {__version__}")
        return EXIT_OK
    name, rest = _find(words)
    if name not in COMMANDS:
        return _group_help(name, rest)
    module = importlib.import_module(COMMANDS[name][0])
    parser = command_parser(name)
    if "-h" in rest or "--help" in rest:
        print(parser.format_help(), end="")
        return EXIT_OK
    instances, _ = parser.parse(rest, os.environ)
    return int(module.run(*instances))


def command_parser(name: str) -> SettingsParser:
    """The parser of a command, from the dataclasses that its file names."""
    module = importlib.import_module(COMMANDS[name][0])
    return SettingsParser(
        prog=f"octavo {name}",
        description=(module.__doc__ or "").strip(),
        classes=module.settings(),
        examples=getattr(module, "EXAMPLES", ""),
    )


def _find(words: list[str]) -> tuple[str, list[str]]:
    """The command (or group) that the line starts with, and the words after it."""
    two = " ".join(words[:2])
    if two in COMMANDS:
        return two, words[2:]
    groups = {name.split()[0] for name in COMMANDS if " " in name}
    if words[0] in COMMANDS or words[0] in groups:
        return words[0], words[1:]
    import difflib

    near = difflib.get_close_matches(words[0], [*COMMANDS, *groups], n=1)
    hint = f"did you mean `octavo {near[0]}`?" if near else "`octavo --help` lists the commands."
    raise UsageError(f"there is no command {words[0]!r}; {hint}")


def _group_help(group: str, rest: list[str]) -> int:
    lines = [f"  {name:<16} {text}" for name, (_, text) in COMMANDS.items() if name.startswith(group + " ")]
    listing = f"usage: octavo {group} COMMAND [flags]\n\n" + "\n".join(lines)
    if rest and rest[0] in ("-h", "--help"):
        print(listing)
        return EXIT_OK
    raise UsageError(
        (f"there is no command '{group} {rest[0]}'" if rest else f"octavo {group} needs a command") + "\n" + listing
    )


def overview() -> str:
    """What `octavo --help` prints."""
    width = max(map(len, COMMANDS)) + 2
    lines = "\n".join(f"  {name:<{width}}{text}" for name, (_, text) in COMMANDS.items())
    return (
        "octavo: take an open-weight language model from a checkpoint to a deployment that is known to be\n"
        "fast enough and good enough.\n\n"
        "usage: octavo COMMAND ... [flags]\n\n"
        f"commands:\n{lines}\n\n"
        "MODEL is a directory, a .gguf file, a Hugging Face id, or `demo` (SmolLM2-135M-Instruct).\n"
        "octavo COMMAND --help shows the flags; octavo --version the version; --debug the traceback of an error."
    )
