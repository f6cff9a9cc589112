"""Incremental text equals the text of the whole, and stop strings cut it exactly."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.sampling_params import SamplingParams
from octavo.engine.detokenizer import Detokenizer, decoder_of

TEXTS = ["Hello world", "naïve café, 日本語のテキスト", "🦜🦜 emoji 👩‍👩‍👧", "a\n\n  b\tc", "x" * 50]


@pytest.fixture(scope="module")
def tokenizer(tiny_llama: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_llama)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("size", [1, 3])
def test_pieces_add_up(tokenizer, text: str, size: int) -> None:
    ids = tokenizer.encode(text)
    detokenizer = Detokenizer(tokenizer, tokenizer.encode("prompt"), SamplingParams())
    pieces = [detokenizer.append(ids[i : i + size]) for i in range(0, len(ids), size)]
    pieces.append(detokenizer.append([], last=True))
    assert "".join(pieces) == text == detokenizer.text
    assert not any("\ufffd" in piece for piece in pieces)


def test_an_incomplete_character_is_released_at_the_end(tokenizer) -> None:
    ids = tokenizer.encode("ab日")[:-1]
    detokenizer = Detokenizer(tokenizer, [], SamplingParams())
    assert "".join(detokenizer.append([i]) for i in ids) == "ab"
    assert detokenizer.append([], last=True) == "\ufffd"


def test_special_tokens_are_skipped_or_shown(tokenizer) -> None:
    ids = [*tokenizer.encode("a"), tokenizer.eos_token_id, *tokenizer.encode("b")]
    hidden = Detokenizer(tokenizer, [], SamplingParams())
    shown = Detokenizer(tokenizer, [], SamplingParams(skip_special_tokens=False))
    assert hidden.append(ids) == "ab"
    assert shown.append(ids) == "a<|end|>b"


def test_garbage_bytes_do_not_hold_text_back_for_ever(tokenizer) -> None:
    continuation = tokenizer.encode("日")[1]  # a continuation byte: never a character on its own
    detokenizer = Detokenizer(tokenizer, [], SamplingParams())
    pieces = [detokenizer.append([continuation]) for _ in range(100)]
    assert sum(map(len, pieces)) > 50


@settings(max_examples=100, deadline=None)
@given(
    text=st.text(alphabet="abcé ", max_size=30),
    stops=st.lists(st.text(alphabet="abcé", min_size=1, max_size=4), min_size=1, max_size=3),
    include=st.booleans(),
    size=st.integers(1, 4),
)
def test_stop_strings_cut_where_the_first_one_ends(
    tokenizer, text: str, stops: list[str], include: bool, size: int
) -> None:
    ids = tokenizer.encode(text)
    detokenizer = Detokenizer(tokenizer, [], SamplingParams(stop=stops, include_stop_str_in_output=include))
    emitted = ""
    for i in range(0, len(ids), size):
        emitted += detokenizer.append(ids[i : i + size])
        # Nothing that was emitted may have to be taken back.
        assert not any(stop in emitted for stop in stops) or detokenizer.finished
    emitted += detokenizer.append([], last=True)
    hits = [(text.find(s) + len(s), text.find(s), s) for s in stops if s in text]
    if not hits:
        assert emitted == text and not detokenizer.finished
        return
    end, start, stop = min(hits)
    assert emitted == text[: end if include else start]
    assert detokenizer.finished and detokenizer.stop_reason == stop


@settings(max_examples=50, deadline=None)
@given(ids=st.lists(st.integers(0, 258), max_size=12), skip=st.booleans())
def test_the_direct_decoder_says_what_transformers_says(tokenizer, ids: list[int], skip: bool) -> None:
    assert decoder_of(tokenizer) == tokenizer.backend_tokenizer.decode
    assert decoder_of(tokenizer)(ids, skip) == tokenizer.decode(ids, skip_special_tokens=skip)


def test_a_tokenizer_that_changes_what_was_decoded_is_asked_itself(tokenizer) -> None:
    class Shouting(type(tokenizer)):
        def _decode(self, *args, **kwargs) -> str:
            return super()._decode(*args, **kwargs).upper()

    shouting = Shouting(tokenizer_object=tokenizer.backend_tokenizer)
    assert decoder_of(shouting)(tokenizer.encode("hello"), True) == "HELLO"
    cleaning = type(tokenizer)(
        tokenizer_object=tokenizer.backend_tokenizer,
        clean_up_tokenization_spaces=True,
        clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output=True,
    )
    ids = tokenizer.encode("a , b")
    assert decoder_of(cleaning)(ids, True) == cleaning.decode(ids, skip_special_tokens=True) == "a, b"
