"""Words that are one token each, so that a prompt of N of them is N tokens long, as text and as ids.

Byte-pair and unigram tokenizers split text at spaces first, so token counts of words add up. Which words are single
tokens is asked of a tokenizer once: of `--processor`, of the server's /tokenize, or assumed when there is neither.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from octavo.errors import UserError

Tokenize = Callable[[str], Awaitable[list[int]]]
MIN_WORDS = 32
FALLBACK_IDS = range(300, 1300)  # exist in every vocabulary of at least 1,300 entries and are no special tokens

_WORDS = """
time year people way day man thing woman life child world school state family student group country problem hand part
place case week company system program question work government number night point home water room mother area money
story fact month lot right study book eye job word business issue side kind head house service friend father power
hour game line end member law car city community name president team minute idea body information back parent face
others level office door health person art war history party result change morning reason research girl guy moment
air teacher force education foot boy age policy music market sense nation plan college interest death experience effect
use class control field development role effort rate heart drug show leader light voice wife whole police mind price
report decision son view relationship town road arm difference value building action season society tax director
position player record paper space ground form event official matter center couple site project activity star table
need court oil half situation cost industry figure street image phone data picture practice piece land product doctor
wall patient worker news test movie north love support technology step baby computer type attention film tree source
organization hair window culture chance brother energy period course summer plant opportunity term letter condition
choice rule daughter south husband floor campaign material population call economy hospital church risk fire future
bank west sport board subject officer rest behavior performance top goal second bed order author blood agency nature
color store sound movement page race concern series language response animal factor decade article east
"""


@dataclass(frozen=True)
class Vocabulary:
    """Words and, where a tokenizer was asked, their ids (the same order); `origin` says who was asked."""

    words: tuple[str, ...]
    token_ids: tuple[int, ...]
    origin: str
    tokens_per_word: float = 1.0  # of `words`; ids are one token each in any case

    def draw(self, rng: random.Random, count: int) -> list[int]:
        """`count` random indices into this vocabulary."""
        return rng.choices(range(max(len(self.words), len(self.token_ids))), k=count)

    def text(self, indices: list[int]) -> str:
        """About as many tokens of text as there are indices: words, each behind a space but the first."""
        count = max(1, round(len(indices) / self.tokens_per_word)) if indices else 0
        return " ".join(self.words[i % len(self.words)] for i in indices[:count])

    def ids(self, indices: list[int]) -> list[int]:
        """As many token ids as there are indices."""
        return [self.token_ids[i % len(self.token_ids)] for i in indices]


async def find(tokenize: Tokenize, origin: str) -> Vocabulary:
    """Keep the words that `tokenize` makes one token of.

    Where hardly any is (a byte-level tokenizer, another script), the tokens of all words serve as ids, which are exact
    in number, and text is measured by the mean length of a word. Raises whatever `tokenize` raises.
    """
    words = list(dict.fromkeys(_WORDS.split()))
    pairs = await _single_tokens(tokenize, words)
    if len(pairs) >= MIN_WORDS:
        return Vocabulary(tuple(w for w, _ in pairs), tuple(i for _, i in pairs), origin)
    tokens = await tokenize(" ".join(words))
    return Vocabulary(
        tuple(words), tuple(sorted(set(tokens))), f"{origin}, text lengths estimated", len(tokens) / len(words)
    )


def assumed(as_text: bool) -> Vocabulary:
    """Without any tokenizer: text of words that most vocabularies have, or low token ids, which are exact in number."""
    if as_text:
        return Vocabulary(tuple(dict.fromkeys(_WORDS.split())), (), "a list of common words, text lengths estimated")
    return Vocabulary((), tuple(FALLBACK_IDS), f"token ids {FALLBACK_IDS[0]}..{FALLBACK_IDS[-1]}")


def processor_tokenize(name: str) -> Tokenize:
    """A tokenizer from a folder or the Hub, through transformers. Raises UserError when there is none."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, ImportError) as error:
        reason = str(error).strip().split("\n", 1)[0]
        raise UserError(
            f"--processor {name!r} is no tokenizer that can be loaded ({reason}); give a folder with tokenizer.json or "
            "a Hub id, or leave it out so that the server's own /tokenize is asked",
            param="processor",
        ) from None

    async def tokenize(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    return tokenize


async def _single_tokens(tokenize: Tokenize, words: list[str]) -> list[tuple[str, int]]:
    """The words that are one token behind a space, with the token; halves are asked until the counts agree."""
    anchor = await tokenize("the")

    async def split(part: list[str]) -> list[tuple[str, int]]:
        ids = (await tokenize(" ".join(["the", *part])))[len(anchor) :]
        if len(ids) == len(part):
            return list(zip(part, ids, strict=True))
        if len(part) == 1:
            return []
        middle = len(part) // 2
        return await split(part[:middle]) + await split(part[middle:])

    return await split(words)
