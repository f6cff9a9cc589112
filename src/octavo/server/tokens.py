"""Text to token ids and single tokens to text, as the server needs them beside the engine's incremental detokenizer."""

from __future__ import annotations

import asyncio
import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from octavo.errors import UserError

LONG_TEXT_CHARS = 16_384  # longer texts are tokenized in a thread, so that streams do not wait for them
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
REPLACEMENT = "\ufffd"


class TextCodec:
    """Encodes prompts and names single tokens.

    `tokenizer` is one of transformers' fast tokenizers (their Rust part is called directly, which is safe from several
    threads), or any object with `encode` and `decode`.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="tokenize")
        self._special_ids = frozenset(getattr(tokenizer, "all_special_ids", ()))
        self._pieces: dict[int, bytes] = {}
        self._style = "decode"
        if self._backend is not None:
            self._backend.no_truncation()
            self._backend.no_padding()
            self._style = _decoder_style(self._backend)

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if len(text) < LONG_TEXT_CHARS:
            return self.encode_now(text, add_special_tokens=add_special_tokens)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._threads, lambda: self.encode_now(text, add_special_tokens=add_special_tokens)
        )

    def encode_now(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if self._backend is not None:
            return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)
        return list(self.tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def piece(self, token_id: int) -> bytes:
        """The bytes that a token stands for; they may be a part of a character."""
        cached = self._pieces.get(token_id)
        if cached is None:
            cached = self._pieces[token_id] = self._find_piece(token_id)
        return cached

    def text(self, token_id: int) -> str:
        return self.piece(token_id).decode("utf-8", errors="replace")

    def token_string(self, token_id: int) -> str:
        """The token as the vocabulary spells it."""
        token = self.tokenizer.convert_ids_to_tokens(token_id)
        return "" if token is None else str(token)

    def check_ids(self, token_ids: list[int], vocab_size: int, name: str) -> None:
        """Raise UserError when an id is outside the model's vocabulary."""
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
            wrong = next(t for t in token_ids if not 0 <= t < vocab_size)
            raise UserError(f"{name} holds {wrong}; token ids are 0 to {vocab_size - 1}", param=name)

    def _find_piece(self, token_id: int) -> bytes:
        if self._style != "decode" and token_id not in self._special_ids:
            token = self._backend.id_to_token(token_id)  # type: ignore[union-attr]
            found = _bytes_of(token, self._style) if token is not None else b""
            if found is not None:
                return found
        return str(self.tokenizer.decode([token_id], skip_special_tokens=False)).encode()


def _decoder_style(backend: Any) -> str:
    """How the vocabulary writes bytes: "bytes" (GPT-2's alphabet), "spaces" (SentencePiece's), else "decode"."""
    decoder = json.loads(backend.to_str()).get("decoder") or {}
    kinds = {part.get("type") for part in decoder.get("decoders", [])} | {decoder.get("type")}
    patterns = [
        part.get("pattern", {}).get("String") for part in decoder.get("decoders", []) if part["type"] == "Replace"
    ]
    if "ByteLevel" in kinds:
        return "bytes"
    if "Metaspace" in kinds or "\u2581" in patterns:
        return "spaces"
    return "decode"


def _bytes_of(token: str, style: str) -> bytes | None:
    if style == "bytes":
        try:
            return bytes(_GPT2_ALPHABET[character] for character in token)
        except KeyError:  # an added token is plain text
            return None
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace("\u2581", " ").encode()


def _gpt2_alphabet() -> dict[str, int]:
    """Byte-level vocabularies write each byte as one printable character: itself if printable, else from U+0100 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    rest = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + i): byte for i, byte in enumerate(rest)})
    return alphabet


_GPT2_ALPHABET = _gpt2_alphabet()
