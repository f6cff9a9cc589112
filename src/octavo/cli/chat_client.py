"""A minimal client of /v1/chat/completions: one streamed answer at a time."""

from __future__ import annotations

from typing import TextIO

import httpx

from octavo.decide.chat_events import text_of
from octavo.errors import OctavoError, UserError


class ChatClient:
    """Speaks to the server at `url` (with or without /v1). UserError when it cannot be reached."""

    def __init__(
        self, url: str, model: str | None, api_key: str | None, max_tokens: int, temperature: float | None
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise UserError(f"--url is {url!r}; it must start with http:// or https://", param="url")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        base = url.rstrip("/").removesuffix("/v1")
        self._url = base
        self._http = httpx.Client(base_url=base, headers=headers, timeout=httpx.Timeout(10.0, read=600.0))
        self._extra = {"max_tokens": max_tokens} | ({} if temperature is None else {"temperature": temperature})
        self._model = model or self._first_model()

    def answer(self, messages: list[dict[str, str]], out: TextIO) -> str:
        """Stream the next assistant message to `out`; returns it whole. OctavoError when the server refuses."""
        body = {"model": self._model, "messages": messages, "stream": True, **self._extra}
        parts = []
        try:
            with self._http.stream("POST", "/v1/chat/completions", json=body) as answer:
                if answer.status_code != 200:
                    answer.read()
                    raise OctavoError(f"the server answered {answer.status_code}: {_message(answer)}")
                for line in answer.iter_lines():
                    piece = text_of(line)
                    if piece is None:
                        break
                    parts.append(piece)
                    out.write(piece)
                    out.flush()
        except httpx.HTTPError as error:
            raise OctavoError(f"the connection to {self._url} broke: {error or type(error).__name__}") from error
        out.write("\n")
        return "".join(parts)

    def _first_model(self) -> str:
        try:
            answer = self._http.get("/v1/models")
        except httpx.HTTPError as error:
            raise UserError(
                f"no server answers at {self._url} ({error}); start one with `octavo serve MODEL`", param="url"
            ) from error
        if answer.status_code != 200:
            raise OctavoError(f"{self._url}/v1/models answered {answer.status_code}: {_message(answer)}")
        listed = answer.json().get("data") or []
        if not listed:
            raise OctavoError(f"the server at {self._url} lists no model")
        return str(listed[0]["id"])


def _message(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return answer.text[:200]
