"""Five questions at once: with five different system prompts, then with the same one.

The second round shares the KV blocks of the system prompt, so it computes far fewer prompt tokens; the server's own
counters show it, and so do the times to the first token.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import httpx

from octavo.builtin_text import builtin_text
from octavo.decide.chat_events import text_of
from octavo.decide.prometheus import MetricsSampler, Sample, read_metrics
from octavo.errors import OctavoError

QUESTIONS = (
    "What is this text about?",
    "Which rule does it give first?",
    "Name one thing that raises an error.",
    "Give a short example of what it describes.",
    "What should a beginner remember from it?",
)
SYSTEM_CHARACTERS = 1600
ANSWER_TOKENS = 24
RESERVED_TOKENS = 160  # of the context, for the question, the chat template and the answer
PATIENCE_SECONDS = 300.0
COUNTERS = ("prefix_cache_queries_total", "prefix_cache_hits_total", "prompt_tokens_total", "generation_tokens_total")
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")


@dataclass
class Answer:
    """One streamed answer: seconds from the round's beginning to the question, from there to first token and end."""

    question: str
    text: str
    asked_s: float
    first_token_s: float
    total_s: float


@dataclass
class Round:
    """Five questions at once, with the server's counters around them and its gauges meanwhile."""

    name: str
    seconds: float
    before: dict[str, float]
    after: dict[str, float]
    samples: list[Sample]
    answers: list[Answer]

    def moved(self, counter: str) -> float:
        return self.after[counter] - self.before[counter]

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens of this round whose KV was already there."""
        queries = self.moved("prefix_cache_queries_total")
        return self.moved("prefix_cache_hits_total") / queries if queries else 0.0

    @property
    def mean_first_token_s(self) -> float:
        return sum(answer.first_token_s for answer in self.answers) / len(self.answers)

    @property
    def peak_running(self) -> int:
        return int(max((s.values["num_requests_running"] for s in self.samples), default=0))


def run_prefix_trial(url: str, model: str, max_model_len: int) -> list[Round]:
    """The two rounds, with shorter system prompts where the context is small.

    OctavoError when the server refuses a question.
    """
    text = builtin_text("heldout")
    length = max(1, min(SYSTEM_CHARACTERS, max_model_len - RESERVED_TOKENS))  # a token is a character or more
    parts = [text[i * length : (i + 1) * length] for i in range(len(QUESTIONS) + 1)]
    different = [f"Text {i + 1}. Answer from it in one sentence.\n{part}" for i, part in enumerate(parts[:-1])]
    same = [f"Text {len(parts)}. Answer from it in one sentence.\n{parts[-1]}"] * len(QUESTIONS)
    return [
        _round(url, model, "different system prompts", different),
        _round(url, model, "the same system prompt", same),
    ]


def _round(url: str, model: str, name: str, systems: list[str]) -> Round:
    before = _counters(url)
    begin = time.monotonic()
    with MetricsSampler(url, GAUGES + COUNTERS) as sampler:
        answers = asyncio.run(_ask_all(url, model, systems, begin))
    seconds = time.monotonic() - begin
    return Round(name, seconds, before, _counters(url), sampler.samples, answers)


def _counters(url: str) -> dict[str, float]:
    seen = read_metrics(url)
    return {name: seen.get(name, 0.0) for name in COUNTERS}


async def _ask_all(url: str, model: str, systems: list[str], origin: float) -> list[Answer]:
    async with httpx.AsyncClient(base_url=url, timeout=httpx.Timeout(10.0, read=PATIENCE_SECONDS)) as client:
        pairs = zip(systems, QUESTIONS, strict=True)
        try:
            asked = (_ask(client, model, system, question, origin) for system, question in pairs)
            return list(await asyncio.gather(*asked))
        except httpx.HTTPError as error:
            raise OctavoError(f"a question to {url} failed: {type(error).__name__} {error}") from error


async def _ask(client: httpx.AsyncClient, model: str, system: str, question: str, origin: float) -> Answer:
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "system", "content": system}, {"role": "user", "content": question}],
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "stream": True,
    }
    begin, first, parts = time.monotonic(), None, []
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        if answer.status_code != 200:
            raise OctavoError(f"the server answered {answer.status_code}: {(await answer.aread()).decode()[:300]}")
        async for line in answer.aiter_lines():
            piece = text_of(line)
            if piece is None:
                break
            if piece:
                first = first or time.monotonic()
                parts.append(piece)
    end = time.monotonic()
    return Answer(question, "".join(parts), begin - origin, (first or end) - begin, end - begin)
