"""The engine over a model whose layers take turns between windows and full attention: memory stays bounded."""

from __future__ import annotations

import pytest
from families import GEMMA
from harness import random_tokens, reference_logits, save_random
from transformers import Gemma2Config

from octavo.core.block_pool import NULL_BLOCK
from octavo.core.sampling_params import SamplingParams
from octavo.engine.config import EngineConfig
from octavo.engine.engine import Engine
from octavo.engine.messages import EngineRequest

BLOCK, WINDOW, CHUNK = 16, 40, 48
PROMPT, ANSWER = 301, 90


class Held:
    """The most blocks that a request held, for each cache group."""

    def __init__(self, engine: Engine) -> None:
        self.cache = engine._scheduler.cache
        self.states = engine._scheduler.states
        self.most: dict[int | None, int] = {}

    def note(self) -> None:
        for request in self.states.running():
            for group, table in enumerate(request.tables):
                window = self.cache._rules[group][0].window
                held = sum(block != NULL_BLOCK for block in table)
                self.most[window] = max(self.most.get(window, 0), held)


def answer(engine: Engine, name: str, prompt: list[int]) -> tuple[list[int], Held]:
    engine.add(EngineRequest(name, prompt, SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True)))
    held, tokens = Held(engine), []
    while engine.has_work:
        for output in engine.step():
            tokens += output.token_ids
        held.note()
    return tokens, held


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory):
    path = tmp_path_factory.mktemp("windows")
    config = Gemma2Config(
        **{**GEMMA, "num_hidden_layers": 4, "max_position_embeddings": 512, "sliding_window": WINDOW},
        query_pre_attn_scalar=8,
    )
    return path, save_random(config, path)


def test_blocks_of_windows_stay_bounded_and_are_found_again(model) -> None:
    path, reference = model
    engine = Engine(
        EngineConfig(
            model=str(path),
            dtype="float32",
            skip_tokenizer_init=True,
            block_size=BLOCK,
            max_num_batched_tokens=CHUNK,
            kv_cache_memory_bytes=2**24,
        )
    )
    prompt = random_tokens(96, PROMPT, seed=1)
    tokens, held = answer(engine, "first", prompt)
    expected = reference_logits(reference, prompt + tokens)[len(prompt) - 1 : -1].argmax(dim=-1).tolist()
    assert tokens == expected

    assert held.most[None] >= (PROMPT + ANSWER - 1) // BLOCK
    # a window, the chunk that is computed, the one before while its step is in flight, and two blocks cut at the ends
    assert held.most[WINDOW] <= (WINDOW + 2 * CHUNK) // BLOCK + 2

    before = engine._scheduler.stats().prefix_hits
    again, _ = answer(engine, "again", prompt)
    assert again == tokens
    assert engine._scheduler.stats().prefix_hits - before >= PROMPT - BLOCK
