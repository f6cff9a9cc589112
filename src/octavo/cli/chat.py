"""Talk to a server, or to a model loaded on the spot.

An empty line or Ctrl-D ends the conversation; /clear forgets it.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import dataclass

from octavo.cli.chat_client import ChatClient
from octavo.decide.server_process import ServerProcess
from octavo.settings import setting
from octavo.settings_parser import UsageError

EXAMPLES = """
  octavo chat demo
  octavo chat --url http://127.0.0.1:8000 --system-prompt "Answer in one sentence."
  octavo chat demo -q "Why is the sky blue?"
"""


@dataclass
class ChatSettings:
    """Whom to talk to, and how."""

    model: str | None = setting(None, "model to load on the spot, instead of --url", positional=True)
    url: str | None = setting(None, "base URL of an OpenAI-compatible server, instead of MODEL")
    model_name: str | None = setting(
        None, "name of the model to ask for; if not given, the first that the server lists", metavar="NAME"
    )
    api_key: str | None = setting(None, "bearer token for the server", metavar="KEY")
    system_prompt: str | None = setting(None, "system message of the conversation", metavar="TEXT")
    quick: str | None = setting(None, "send this one message, print the answer and exit", short="-q", metavar="TEXT")
    max_tokens: int = setting(512, "longest answer in tokens")
    temperature: float | None = setting(
        None, "sampling temperature, 0 for the likeliest token; if not given, the server's"
    )

    def __post_init__(self) -> None:
        if (self.model is None) == (self.url is None):
            raise UsageError("give MODEL or --url URL, one of the two")
        if self.max_tokens < 1:
            raise UsageError(f"--max-tokens is {self.max_tokens}; it must be at least 1")


def settings() -> tuple[type, ...]:
    return (ChatSettings,)


def run(s: ChatSettings) -> int:
    if s.model is not None:
        print(f"loading {s.model} ...", file=sys.stderr)
    with ServerProcess(s.model) if s.model is not None else nullcontext() as server:
        url = server.url if server is not None else str(s.url)
        client = ChatClient(url, s.model_name, s.api_key, s.max_tokens, s.temperature)
        messages = [{"role": "system", "content": s.system_prompt}] if s.system_prompt else []
        if s.quick is not None:
            client.answer([*messages, {"role": "user", "content": s.quick}], sys.stdout)
            return 0
        _converse(client, messages)
    return 0


def _converse(client: ChatClient, start: list[dict[str, str]]) -> None:
    messages = list(start)
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            print()
            return
        if not line:
            return
        if line == "/clear":
            messages = list(start)
            continue
        messages.append({"role": "user", "content": line})
        messages.append({"role": "assistant", "content": client.answer(messages, sys.stdout)})
