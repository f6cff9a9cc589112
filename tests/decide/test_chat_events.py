"""The text in a stream's lines, and what is said when a stream is something else."""

from __future__ import annotations

import pytest

from octavo.decide.chat_events import text_of
from octavo.errors import OctavoError


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ('data: {"choices": [{"delta": {"content": "hi "}}]}', "hi "),
        ('data:{"choices": [{"delta": {"content": "no space"}}]}', "no space"),
        ('data: {"choices": [{"delta": {"role": "assistant", "content": null}}]}', ""),
        ('data: {"choices": [], "usage": {"total_tokens": 3}}', ""),
        ("", ""),
        (": comment", ""),
        ("data: [DONE]", None),
        ("data:[DONE]", None),
    ],
)
def test_text_of_a_line(line: str, text: str | None) -> None:
    assert text_of(line) == text


@pytest.mark.parametrize("data", ["{", "[1]", "7", '"error"', '{"choices": [3]}', '{"choices": [{"delta": 1}]}', ""])
def test_what_is_no_chunk_is_named(data: str) -> None:
    with pytest.raises(OctavoError, match="other than a chat chunk"):
        text_of(f"data: {data}")


@pytest.mark.parametrize("error", ['{"message": "the engine ended"}', '"the engine ended"'])
def test_an_error_in_the_stream_is_raised(error: str) -> None:
    with pytest.raises(OctavoError, match="broke off: the engine ended"):
        text_of(f'data: {{"error": {error}}}')
