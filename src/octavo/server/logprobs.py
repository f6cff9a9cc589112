"""Log-probabilities in the three shapes that the API has: chat's, completions', and vLLM's prompt_logprobs.

JSON has no infinity, so a token that cannot come has -9999.0, as in vLLM. All shapes take a number from the same
dictionary, so the log-probability of a token is the identical float wherever it appears.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from octavo.engine.outputs import Logprob
from octavo.server.tokens import TextCodec

LEAST_LOGPROB = -9999.0

Position = Mapping[int, Logprob]


class LogprobFormatter:
    """`as_ids` writes tokens as "token_id:N" instead of their text. Without a codec (no tokenizer) it always does."""

    def __init__(self, codec: TextCodec | None, *, as_ids: bool = False) -> None:
        self._codec = codec
        self._as_ids = as_ids

    def name(self, token_id: int) -> str:
        if self._as_ids or self._codec is None:
            return f"token_id:{token_id}"
        return self._codec.text(token_id)

    def chat(self, token_ids: Sequence[int], positions: Sequence[Position], top: int) -> dict[str, Any]:
        """OpenAI's `choices[].logprobs` of a chat answer, with `top` alternatives a token."""
        content = []
        for token_id, position in zip(token_ids, positions, strict=True):
            entry = self._chat_entry(token_id, position[token_id])
            entry["top_logprobs"] = [self._chat_entry(t, p) for t, p in _ranked(position)[:top]]
            content.append(entry)
        return {"content": content}

    def completion(
        self, token_ids: Sequence[int], positions: Sequence[Position | None], top: int, offset: int
    ) -> dict[str, Any]:
        """OpenAI's `choices[].logprobs` of a completion; `offset` is where the first token's text begins.

        As in OpenAI's, the dictionary of a position has the `top` best tokens and the token that was taken. Two tokens
        with the same text (parts of characters) share a key; the better one keeps it.
        """
        tokens = [self.name(token_id) for token_id in token_ids]
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        taken = [None if p is None else _clamp(p[t]) for t, p in zip(token_ids, positions, strict=True)]
        best = [None if p is None else self._best(t, p, top) for t, p in zip(token_ids, positions, strict=True)]
        return {"tokens": tokens, "token_logprobs": taken, "top_logprobs": best, "text_offset": offsets}

    def prompt(self, positions: Sequence[Position | None]) -> list[dict[str, Any] | None]:
        """vLLM's `prompt_logprobs`: for each prompt token the candidates by token id; null for the first."""
        return [
            None
            if position is None
            else {
                str(t): {"logprob": _clamp(p), "rank": p.rank, "decoded_token": self.name(t)}
                for t, p in position.items()
            }
            for position in positions
        ]

    def _best(self, taken: int, position: Position, top: int) -> dict[str, float]:
        best: dict[str, float] = {}
        ranked = _ranked(position)
        for token_id, logprob in [*ranked[:top], (taken, position[taken])]:
            best.setdefault(self.name(token_id), _clamp(logprob))
        return best

    def _chat_entry(self, token_id: int, logprob: Logprob) -> dict[str, Any]:
        name = self.name(token_id)
        piece = name.encode() if self._as_ids or self._codec is None else self._codec.piece(token_id)
        return {"token": name, "logprob": _clamp(logprob), "bytes": list(piece)}


def _clamp(logprob: Logprob) -> float:
    return max(logprob.logprob, LEAST_LOGPROB)


def _ranked(position: Position) -> list[tuple[int, Logprob]]:
    return sorted(position.items(), key=lambda item: -item[1].logprob)
