"""Tokenizers from GGUF files against transformers."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest

from octavo.checkpoint.gguf_tokenizer import build_backend, merges_from_scores
from octavo.checkpoint.reader import open_checkpoint
from octavo.errors import CheckpointError

TEXTS = [
    "Hello world",
    "  leading and trailing  ",
    "1234567890 3.14159 0x1F 2026-11-30 ١٢٣ ½",
    "don't we'll I'M they'RE it's",
    "tabs\tand\nnew\r\nlines\n\n\n  mixed \n",
    "def f(x: int) -> dict[str, float]:\n    return {'a': x ** 2, \"b\": [1, 2, 3]}  # comment\n",
    "naïve café Straße ÅÄÖ e\u0301 ﬁ",
    "日本語のテキスト 中文字符 한국어 ไทย العربية हिन्दी",
    "emoji 👩‍👩‍👧‍👦 🇫🇷 🙂🙃",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|><repo_name>x",
    "a" * 300 + " " * 40 + "!?" * 20,
    "\x00\x01\u200b\ufeff\U0010ffff",
    "",
    " ",
    "\n",
]


def random_texts(count: int) -> list[str]:
    generator = random.Random(0)
    pools = ["abc DEF ghi", "0123456789 .,", "\n\t  ", "éüßñ", "日本語한", "'sdtm\"", "{}[]()<>|_-+=*/\\", "🙂👍🏽"]
    return [
        "".join(generator.choice(generator.choice(pools)) for _ in range(generator.randrange(1, 60)))
        for _ in range(count)
    ]


@pytest.fixture(scope="module")
def demo_tokenizer(demo_path: Path) -> Any:
    return open_checkpoint(demo_path).load_tokenizer()


def test_the_demo_tokenizes_as_transformers_does(demo_path: Path, demo_tokenizer: Any) -> None:
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(demo_path.parent, gguf_file=demo_path.name)
    texts = TEXTS + random_texts(300)
    for text in texts:
        if not any(letter.isnumeric() for letter in text):
            assert demo_tokenizer(text)["input_ids"] == theirs(text)["input_ids"], text
    # transformers' reader of GGUF does not know the cuts that the file names; SmolLM2's own tokenizer.json has these.
    own = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(own)
    for text in texts:
        ids = demo_tokenizer(text)["input_ids"]
        assert ids == theirs(text)["input_ids"], text
        assert demo_tokenizer.decode(ids, skip_special_tokens=False) == text
    messages = [{"role": "user", "content": "Hi"}]
    ours, other = (t.apply_chat_template(messages, tokenize=False) for t in (demo_tokenizer, theirs))
    assert ours == other


def test_the_demos_special_tokens_and_template(demo_tokenizer: Any) -> None:
    assert len(demo_tokenizer) == demo_tokenizer.vocab_size == 49152
    assert (demo_tokenizer.eos_token, demo_tokenizer.eos_token_id) == ("<|im_end|>", 2)
    assert set(demo_tokenizer.all_special_ids) >= {0, 1, 2}
    assert demo_tokenizer.tokenize("a 123") == ["a", "Ġ", "1", "2", "3"]
    assert demo_tokenizer("<|im_start|><|im_end|><|endoftext|>")["input_ids"] == [1, 2, 0]
    assert demo_tokenizer.decode([1, 19556], skip_special_tokens=True) == demo_tokenizer.decode([19556])
    text = demo_tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def byte_level_metadata(pre: str | None) -> dict[str, Any]:
    """A small byte-level vocabulary, trained on the texts so that merges cross what the cuts keep apart."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    trained.train_from_iterator(TEXTS + random_texts(200), trainer)
    import json

    model = json.loads(trained.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    metadata = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [*tokens, "<|end|>", "<think>"],
        "tokenizer.ggml.token_type": [1] * len(tokens) + [3, 4],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": len(tokens),
        "tokenizer.ggml.eos_token_id": len(tokens),
    }
    return metadata | ({} if pre is None else {"tokenizer.ggml.pre": pre})


def write_metadata(path: Path, metadata: dict[str, Any]) -> None:
    writer = gguf.GGUFWriter(path, metadata["general.architecture"])
    for key, value in metadata.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif key != "general.architecture":
            writer.add_string(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "gpt-2", "tekken", "gpt-4o", None])
def test_cuts_are_transformers(pre: str | None, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    metadata = byte_level_metadata(pre)
    metadata["tokenizer.ggml.add_bos_token"] = False
    write_metadata(tmp_path / "t.gguf", metadata)
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="t.gguf")
    ours = build_backend(tmp_path / "t.gguf", metadata)
    # ignore_merges is in llama-bpe's own tokenizer.json, though transformers' reader of GGUF leaves it out
    ours.model.ignore_merges = False
    for text in [*TEXTS, *random_texts(200), "a<think>b<|end|>c"]:
        if "<|endoftext|>" in text:
            continue  # GPT2Tokenizer adds that token, which this vocabulary has not
        if pre == "qwen2" and "e\u0301" in text:
            continue  # Qwen's tokenizer.json normalizes to NFC, transformers' reader of GGUF does not
        assert ours.encode(text).ids == theirs(text)["input_ids"], text


def test_qwen_normalizes_and_llama3_looks_whole_pieces_up() -> None:
    qwen = build_backend(Path("x"), byte_level_metadata("qwen2"))
    assert qwen.encode("e\u0301").ids == qwen.encode("é").ids
    assert build_backend(Path("x"), byte_level_metadata("llama-bpe")).model.ignore_merges


@pytest.mark.parametrize(("bos", "eos"), [(True, False), (False, True), (True, True), (False, False)])
def test_bos_and_eos_are_added_when_the_file_says_so(bos: bool, eos: bool) -> None:
    metadata = byte_level_metadata("gpt-2")
    metadata |= {"tokenizer.ggml.add_bos_token": bos, "tokenizer.ggml.add_eos_token": eos}
    end = metadata["tokenizer.ggml.eos_token_id"]
    backend = build_backend(Path("x"), metadata)
    middle = backend.encode("abc", add_special_tokens=False).ids
    assert backend.encode("abc").ids == [end] * bos + middle + [end] * eos


def sentencepiece_metadata() -> dict[str, Any]:
    pieces = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    types = [2, 3, 3] + [6] * 256
    words = ["▁the", "▁there", "here", "th", "er", "he", "re", "▁t", "▁a", "an", "▁an", "nd", "▁and", "▁▁", "ing"]
    letters = sorted(set("abcdefghijklmnopqrstuvwxyzABC.,!▁"))
    scores = [0.0] * 259 + [-float(i) for i in range(len(words))] + [-100.0 - i for i in range(len(letters))]
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces + words + letters,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types + [1] * (len(words) + len(letters)),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def test_sentencepiece_as_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    metadata = sentencepiece_metadata()
    write_metadata(tmp_path / "t.gguf", metadata)
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="t.gguf")
    ours = build_backend(tmp_path / "t.gguf", metadata)
    for text in ["the other thing and there", "an error, here!", "é日", "there  are two", "A.B.C and"]:
        ids = ours.encode(text).ids
        assert ids[0] == 1
        assert ids == theirs(text)["input_ids"], text
        assert ours.decode(ids, skip_special_tokens=True) == text


def test_merges_are_those_of_the_scores() -> None:
    vocab = {"a": 0, "b": 1, "ab": 2, "abb": 3, "bb": 4}
    assert merges_from_scores(vocab, [0, 0, -2, -3, -1]) == [("b", "b"), ("a", "b"), ("a", "bb"), ("ab", "b")]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.pre": "never-heard-of"}, r"never-heard-of.*--tokenizer"),
        ({"tokenizer.ggml.model": "rwkv"}, r"rwkv.*--tokenizer"),
        ({"tokenizer.ggml.model": None}, r"no tokenizer.*--tokenizer"),
        ({"tokenizer.ggml.tokens": []}, r"no tokenizer.*--tokenizer"),
    ],
)
def test_a_tokenizer_that_cannot_be_built_says_the_way_out(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        build_backend(Path("x.gguf"), byte_level_metadata("gpt-2") | change)


def test_a_sentencepiece_vocabulary_without_scores_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"x\.gguf.*3 scores for \d+ tokens and no merges.*--tokenizer"):
        build_backend(Path("x.gguf"), sentencepiece_metadata() | {"tokenizer.ggml.scores": [0.0, 0.0, 0.0]})


def test_a_file_without_a_tokenizer(
    small_models: dict[str, Any], gguf_writer: Callable[..., Any], tmp_path: Path
) -> None:
    gguf_writer(tmp_path / "m.gguf", small_models["llama"])
    with pytest.raises(CheckpointError, match=r"m\.gguf holds no tokenizer"):
        open_checkpoint(tmp_path / "m.gguf").load_tokenizer()
