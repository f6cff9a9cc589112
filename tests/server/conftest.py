"""One real server for the whole session, with a tiny random model."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from servers import RunningServer, real_server

MODEL_NAME = "tiny"


@pytest.fixture(scope="session")
def server(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    engine = {"max_num_seqs": 16, "dtype": "float32", "kv_cache_memory_bytes": 1 << 22}
    settings = {
        "served_model_name": [MODEL_NAME, "alias"],
        "enable_prompt_tokens_details": True,
        "override_generation_config": {"temperature": 0.0},
    }
    with real_server(tmp_path_factory.mktemp("server"), str(tiny_llama), engine, settings) as running:
        yield running


@pytest.fixture(scope="session")
def client(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0, timeout=60)


@pytest.fixture(scope="session")
def tokenizer(tiny_llama: Path) -> Any:
    from octavo.engine.tokenizer import load_tokenizer

    return load_tokenizer(str(tiny_llama))
