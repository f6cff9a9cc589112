"""What all embeddings have in common: how texts become token ids, and how vectors are normalised and cut."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from octavo.checkpoint.base import Checkpoint
from octavo.core.sampling_params import SamplingParams
from octavo.engine.messages import EmbeddingInfo, EngineInfo, EngineRequest
from octavo.errors import UnsupportedModelError, UserError
from octavo.models.base import CausalLM
from octavo.models.sentence import SentenceConfig, read_sentence_config

logger = logging.getLogger(__name__)

_ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)


def embedding_request(request_id: str, token_ids: list[int], priority: int = 0) -> EngineRequest:
    """What the engine is asked for one vector."""
    return EngineRequest(request_id, token_ids, _ONE_TOKEN, priority, embeds=True)


def embedding_info(sentence: SentenceConfig, size: int, config: dict[str, Any]) -> EmbeddingInfo:
    """What is told of a model whose vectors have `size` numbers; `config` is its config.json."""
    sizes = list(config.get("matryoshka_dimensions") or [])
    return EmbeddingInfo(
        size=size,
        is_normalized=sentence.is_normalized,
        can_be_cut=bool(sizes or config.get("is_matryoshka")),
        matryoshka=sizes,
        prompts=sentence.prompts,
        default_prompt_name=sentence.default_prompt_name,
        lowercases=sentence.lowercases,
    )


def causal_embedding_info(checkpoint: Checkpoint, model: CausalLM) -> EmbeddingInfo | None:
    """The same for a causal model, which gives its last token; None, with the reason logged, for other poolings."""
    try:
        sentence = read_sentence_config(checkpoint.path, "lasttoken")
    except UnsupportedModelError as error:
        logger.warning("no embeddings: %s", error)
        return None
    if sentence.pooling != "lasttoken":
        logger.warning("no embeddings: the checkpoint's pooling is %s, a causal model's lasttoken", sentence.pooling)
        return None
    return embedding_info(sentence, model.hidden_size, checkpoint.config)


def embedding_bytes(vector: Tensor, is_normalized: bool) -> bytes:
    """A float32 vector [H] on the host, at unit length if it is to be, as bytes."""
    values = vector.numpy()
    return (unit(values) if is_normalized else values).tobytes()


def unit(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """The vector at unit length; one of zeros stays as it is."""
    return values / np.float32(max(float(np.linalg.norm(values)), 1e-12))


def cut(values: NDArray[np.float32], dimensions: int | None, info: EmbeddingInfo) -> NDArray[np.float32]:
    """The first `dimensions` numbers, at unit length again (Kusupati et al. 2022, arXiv 2205.13147)."""
    if dimensions is None or dimensions == info.size:
        return values
    return unit(values[:dimensions]) if info.is_normalized else values[:dimensions]


def check_dimensions(dimensions: int | None, info: EmbeddingInfo, model: str) -> None:
    """Raise UserError for a size that the vectors cannot be cut to."""
    if dimensions is None or dimensions == info.size:
        return
    if not info.can_be_cut:
        raise UserError(
            f"dimensions is {dimensions}, but {model} was not made for vectors shorter than its {info.size} numbers: "
            'leave it out (or set "is_matryoshka": true in its config.json, if it was)',
            param="dimensions",
        )
    if dimensions not in (info.matryoshka or range(1, info.size + 1)):
        sizes = ", ".join(map(str, info.matryoshka)) or f"1 to {info.size}"
        raise UserError(f"dimensions is {dimensions}; {model} gives {sizes}", param="dimensions")


class EmbeddingInputs:
    """Texts and token ids as one model's embeddings want them; `tokenizer` is None where there is none."""

    def __init__(self, info: EngineInfo, tokenizer: Any) -> None:
        assert info.embedding is not None
        self._info, self._embedding = info, info.embedding
        self._tokenizer = tokenizer
        self._tail = 0 if tokenizer is None else _special_tail(tokenizer)

    def prompt(self, name: str | None) -> str:
        """The text that goes before an input: that of `name`, else of the model's default. Raises UserError."""
        prompts, name = self._embedding.prompts, name or self._embedding.default_prompt_name
        if name is None:
            return ""
        if name not in prompts:
            known = ", ".join(prompts) or "none"
            raise UserError(f"prompt_name is {name!r}; the model has {known}", param="prompt_name")
        return prompts[name]

    def encode(self, texts: list[str], prompt_name: str | None = None) -> list[list[int]]:
        """Token ids of texts, with the tokens that the model's tokenizer puts around them."""
        if self._tokenizer is None:
            raise UserError("there is no tokenizer (skip_tokenizer_init); give token ids", param="input")
        if "" in texts:
            raise UserError("an input is empty text; it must have at least one character", param="input")
        prompt = self.prompt(prompt_name)
        texts = [prompt + text for text in texts]
        if self._embedding.lowercases:
            texts = [text.lower() for text in texts]
        return list(self._tokenizer(texts, truncation=False, padding=False, verbose=False)["input_ids"])

    def fit(self, ids: list[int], keep: int | None, where: str, *, is_text: bool, side: str | None = None) -> list[int]:
        """Check one input, cut to `keep` tokens if that is given (-1: as many as the model takes).

        The end is cut off (the beginning with side "left"); tokens that the tokenizer puts last stay. `where` names the
        input in errors, which are UserErrors.
        """
        limit, vocab = self._info.max_model_len, self._info.vocab_size
        if side not in (None, "left", "right"):
            raise UserError(f"truncation_side is {side!r}; it must be 'left' or 'right'", param="truncation_side")
        if keep is not None:
            if keep != -1 and not 1 <= keep <= limit:
                raise UserError(
                    f"truncate_prompt_tokens is {keep}; it must be -1 or 1 to {limit}", param="truncate_prompt_tokens"
                )
            ids = _truncate(ids, limit if keep == -1 else keep, side or "right", self._tail if is_text else 0)
        if not ids:
            raise UserError(f"{where} is empty (0 tokens); it must have at least 1 token", param="input")
        if len(ids) > limit:
            raise UserError(
                f"{where} has {len(ids)} tokens; {self._info.model} takes at most {limit}: shorten it, or let it be "
                "cut with truncate_prompt_tokens (-1 keeps as many as fit)",
                param="input",
            )
        low, high = min(ids), max(ids)
        if low < 0 or high >= vocab:
            wrong = low if low < 0 else high
            raise UserError(f"{where} holds the token id {wrong}; ids are 0 to {vocab - 1}", param="input")
        return ids


def _truncate(ids: list[int], keep: int, side: str, tail: int) -> list[int]:
    if len(ids) <= keep:
        return ids
    if side == "left":
        return ids[-keep:]
    tail = min(tail, keep)
    return ids[: keep - tail] + ids[len(ids) - tail :]


def _special_tail(tokenizer: Any) -> int:
    """How many tokens the tokenizer puts after a text, [SEP] for instance."""
    plain, whole = (tokenizer.encode("a", add_special_tokens=special, verbose=False) for special in (False, True))
    return next((n for n in range(len(whole)) if whole[len(whole) - n - len(plain) : len(whole) - n] == plain), 0)
