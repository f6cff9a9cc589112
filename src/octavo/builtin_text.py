"""English text that every Python installation carries, for calibration and for perplexity without a download.

`pydoc_data.topics` is the language reference that `help()` shows, some 700 kB of technical prose with code. It is cut
into two parts that share no paragraph, so that a model calibrated on one can be judged on the other.
"""

from __future__ import annotations

from functools import cache

from octavo.errors import UserError

PARTS = ("calibration", "heldout")
_HELD_OUT_EVERY = 3  # every third topic is held out


@cache
def builtin_text(part: str = "calibration") -> str:
    """The text of one part, "calibration" (about two thirds) or "heldout"; the same on every call.

    Topics are taken in alphabetical order. Several topics repeat sections of others, so a paragraph of the held-out
    part that also occurs in the calibration part is dropped, and so is a repeated one. UserError for another part, and
    where the Python installation was stripped of the text.
    """
    if part not in PARTS:
        raise UserError(f"there is no built-in text {part!r}; the parts are {' and '.join(PARTS)}")
    topics = _topics()
    names = sorted(topics)
    held_out = set(names[_HELD_OUT_EVERY - 1 :: _HELD_OUT_EVERY])
    calibration = _paragraphs([topics[name] for name in names if name not in held_out], seen=set())
    if part == "calibration":
        return "\n\n".join(calibration)
    seen = {_key(paragraph) for paragraph in calibration}
    return "\n\n".join(_paragraphs([topics[name] for name in names if name in held_out], seen))


def _topics() -> dict[str, str]:
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise UserError(
            "this Python installation lacks pydoc_data.topics, which the built-in text is taken from; "
            "give a text file or a data set instead"
        ) from None
    return topics


def _key(paragraph: str) -> str:
    return " ".join(paragraph.split())


def _paragraphs(texts: list[str], seen: set[str]) -> list[str]:
    """Paragraphs of all texts in order, without those whose words are in `seen` (which grows)."""
    kept = []
    for text in texts:
        for paragraph in text.split("\n\n"):
            key = _key(paragraph)
            if key and key not in seen:
                seen.add(key)
                kept.append(paragraph.strip("\n"))
    return kept
