"""The tokenizer inside a GGUF file, as a transformers fast tokenizer.

Byte-level BPE ("gpt2") and sentencepiece BPE ("llama") vocabularies are read. How text is cut before the merges apply
is not in the file: `tokenizer.ggml.pre` names it, and the cuts are those of the named models' own tokenizer.json.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from octavo.errors import CheckpointError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + REST
QWEN2 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + REST
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORDS = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_REST_SLASH = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEKKEN = _WORDS % ("", "") + r"|\p{N}" + _REST_SLASH
GPT4O = _WORDS % (CONTRACTIONS + "?", CONTRACTIONS + "?") + r"|\p{N}{1,3}" + _REST_SLASH

# How the text is cut: by one pattern, by GPT-2's own pattern, or by GPT-2's with every digit on its own.
PATTERNS = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "smaug-bpe", "dbrx"), LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), QWEN2),
    "tekken": TEKKEN,
    **dict.fromkeys(("gpt-4o", "llama4"), GPT4O),
}
GPT2_LIKE = ("gpt-2", "phi-2", "olmo", "jina-es", "jina-de", "mpt", "default", None)
DIGITS_APART = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
# These look a whole piece up before merging it (tokenizer.json's ignore_merges).
WHOLE_PIECES_FIRST = ("llama-bpe", "llama3", "llama-v3", "falcon3", "tekken", "llama4", "pixtral")
SPECIAL_NAMES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def build_tokenizer(path: Path, metadata: dict[str, Any]) -> Any:
    """PreTrainedTokenizerFast from a file's metadata. CheckpointError when there is none or it is of another kind."""
    # Not AutoTokenizer, which imports several hundred configurations.
    from transformers import PreTrainedTokenizerFast

    backend = build_backend(path, metadata)
    tokens = metadata["tokenizer.ggml.tokens"]
    named = {}
    for name, key in SPECIAL_NAMES.items():
        index = metadata.get(f"tokenizer.ggml.{key}")
        if index is not None and 0 <= index < len(tokens):
            named[name] = tokens[index]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_Given(backend),
        clean_up_tokenization_spaces=False,
        **named,
    )
    length = metadata.get(f"{metadata.get('general.architecture')}.context_length")
    if length:
        tokenizer.model_max_length = int(length)
    if template := metadata.get("tokenizer.chat_template"):
        tokenizer.chat_template = template
    return tokenizer


class _Given:
    """A backend that transformers may keep: its deep copy goes by way of JSON and takes longest (Gemma: 1.2 s)."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def __deepcopy__(self, _: dict[int, Any]) -> Any:
        return self._backend


def build_backend(path: Path, metadata: dict[str, Any]) -> Any:
    """The `tokenizers.Tokenizer` alone."""
    kind = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens or kind in (None, "none", "no_vocab"):
        raise CheckpointError(f"{path} holds no tokenizer; name one with --tokenizer")
    if kind == "gpt2":
        backend = _byte_level(path, metadata)
    elif kind == "llama":
        backend = _sentencepiece(path, metadata)
    else:
        raise CheckpointError(
            f"{path}: a tokenizer of the kind {kind!r} is not read (gpt2 and llama are); name one with --tokenizer"
        )
    _add_special_tokens(backend, tokens, metadata.get("tokenizer.ggml.token_type") or [])
    # llama.cpp's rule for files that do not say, those of Llama 3 among them
    default_bos = kind == "llama" or metadata.get("tokenizer.ggml.pre") in WHOLE_PIECES_FIRST
    _add_bos_and_eos(backend, metadata, tokens, default_bos)
    return backend


def _byte_level(path: Path, metadata: dict[str, Any]) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers, processors

    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges", [])]
    pre = metadata.get("tokenizer.ggml.pre")
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab, merges, fuse_unk=False, ignore_merges=pre in WHOLE_PIECES_FIRST))
    backend.pre_tokenizer = _pre_tokenizer(path, pre)
    if pre in ("qwen2", "deepseek-r1-qwen"):
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    return backend


def _pre_tokenizer(path: Path, pre: str | None) -> Any:
    from tokenizers import Regex, pre_tokenizers

    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre in GPT2_LIKE:
        return gpt2
    if pre in DIGITS_APART:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    if pre in PATTERNS:
        split = pre_tokenizers.Split(Regex(PATTERNS[pre]), behavior="isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    raise CheckpointError(
        f"{path}: the pre-tokenizer {pre!r} is not known, and a guess would change the tokens; "
        "name the model's own tokenizer with --tokenizer"
    )


def _sentencepiece(path: Path, metadata: dict[str, Any]) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers

    tokens = metadata["tokenizer.ggml.tokens"]
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges", [])]
    scores = metadata.get("tokenizer.ggml.scores") or []
    if not merges and len(scores) != len(tokens):
        raise CheckpointError(
            f"{path}: its tokenizer has {len(scores)} scores for {len(tokens)} tokens and no merges; "
            "name another with --tokenizer"
        )
    merges = merges or merges_from_scores(vocab, scores)
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    backend = Tokenizer(models.BPE(vocab, merges, unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True))
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    steps: list[Any] = [normalizers.Prepend("▁")] if prefix else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    undo: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(undo + ([decoders.Strip(" ", 1, 0)] if prefix else []))
    return backend


def merges_from_scores(vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """The merges that a sentencepiece vocabulary implies: every split of a token into two tokens, best score first.

    sentencepiece keeps no merges; at each step it joins the neighbours whose union scores highest, and among the
    splits of one union the order is that of the parts' ids.
    """
    merges: list[tuple[str, str]] = []
    for token in sorted(vocab, key=lambda token: (-scores[vocab[token]], vocab[token])):
        cuts = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        parts = [(left, right) for left, right in cuts if left in vocab and right in vocab]
        if len(parts) > 1:
            parts.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        merges += parts
    return merges


def _add_special_tokens(backend: Any, tokens: list[str], types: list[int]) -> None:
    from tokenizers import AddedToken

    backend.add_special_tokens(
        [
            AddedToken(t, special=True, normalized=False)
            for t, kind in zip(tokens, types, strict=False)
            if kind == CONTROL
        ]
    )
    backend.add_tokens(
        [AddedToken(t, normalized=False) for t, kind in zip(tokens, types, strict=False) if kind == USER_DEFINED]
    )


def _add_bos_and_eos(backend: Any, metadata: dict[str, Any], tokens: list[str], default_bos: bool) -> None:
    from tokenizers import processors

    def wanted(name: str, default: bool) -> tuple[str, int] | None:
        index = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if index is None or not metadata.get(f"tokenizer.ggml.add_{name}_token", default):
            return None
        return tokens[index], index

    bos, eos = wanted("bos", default_bos), wanted("eos", False)
    if bos is None and eos is None:
        return
    first, last = ([bos[0]] if bos else []), ([eos[0]] if eos else [])
    pair = [*first, "$A", *last, *[f"{token}:1" for token in first], "$B:1", *[f"{token}:1" for token in last]]
    template = processors.TemplateProcessing(
        single=[*first, "$A", *last],
        pair=pair,
        special_tokens=[token for token in (bos, eos) if token],
    )
    backend.post_processor = template
