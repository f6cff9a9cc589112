"""`/v1/embeddings` over HTTP: the openai package and plain requests, on an encoder and on a causal model."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from servers import RunningServer, real_server

from encoders import expected_vectors, write_encoder

TEXTS = ["the cat runs", "a b c d e f g h", "dog"]
MAX_PROMPTS = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("encoder"), matryoshka_dimensions=[8, 32])


@pytest.fixture(scope="module")
def encoder(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    settings = {"served_model_name": ["small"], "max_prompts": MAX_PROMPTS}
    with real_server(tmp_path_factory.mktemp("server"), str(folder), {"max_num_batched_tokens": 32}, settings) as up:
        yield up


@pytest.fixture(scope="module")
def openai_client(encoder: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=encoder.url + "/v1", api_key="unused", max_retries=0, timeout=60)


def ask(server: RunningServer, **body: Any) -> httpx.Response:
    return server.post("/v1/embeddings", {"model": "small", "input": "the cat", **body})


def numbers(answer: httpx.Response) -> list[list[float]]:
    assert answer.status_code == 200, answer.text
    return [item["embedding"] for item in answer.json()["data"]]


def test_the_openai_client_gets_the_models_vectors(openai_client: openai.OpenAI, folder: Path) -> None:
    """It asks for base64 unless told otherwise, and decodes that itself."""
    answer = openai_client.embeddings.create(model="small", input=TEXTS)
    ids = [[2, *tokens, 3] for tokens in ([31, 32, 34], list(range(5, 13)), [33])]
    assert [item.index for item in answer.data] == [0, 1, 2]
    assert answer.object == "list"
    assert answer.model == "small"
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, ids))
    found = torch.tensor([item.embedding for item in answer.data])
    torch.testing.assert_close(found, expected_vectors(folder, ids), atol=1e-5, rtol=0)
    floats = openai_client.embeddings.create(model="small", input=TEXTS, encoding_format="float", user="somebody")
    np.testing.assert_array_equal(np.float32([item.embedding for item in floats.data]), found.numpy())
    assert openai_client.models.list().data[0].id == "small"


def test_token_ids_are_inputs(encoder: RunningServer) -> None:
    text = numbers(ask(encoder, input="the cat"))
    assert numbers(ask(encoder, input=[2, 31, 32, 3])) == text
    both = numbers(ask(encoder, input=[[2, 31, 32, 3], [2, 33, 3]]))
    np.testing.assert_allclose(both[0], text[0], atol=1e-6)


def test_base64_holds_little_endian_floats(encoder: RunningServer) -> None:
    plain, packed = numbers(ask(encoder)), numbers(ask(encoder, encoding_format="base64"))
    assert list(np.frombuffer(base64.b64decode(packed[0]), "<f4")) == plain[0]  # type: ignore[arg-type]


def test_dimensions_cut_and_renormalise(encoder: RunningServer) -> None:
    whole, cut = numbers(ask(encoder)), numbers(ask(encoder, dimensions=8))
    assert len(cut[0]) == 8
    np.testing.assert_allclose(cut[0], np.array(whole[0][:8]) / np.linalg.norm(whole[0][:8]), atol=1e-6)


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        ({"input": "cat " * 80}, "input has 82 tokens; .* at most 66.*truncate_prompt_tokens", None),
        ({"input": ["a", "cat " * 80]}, r"input\[1\] has 82 tokens", None),
        ({"input": ""}, "empty text", None),
        ({"input": []}, "input is an empty list", "input"),
        ({"input": [[]]}, "input is empty", None),
        ({"input": 7}, "input is 7; it must be text, token ids", "input"),
        ({"input": ["a", 7]}, r"input\[1\] is 7", "input"),
        ({"input": [1, 99]}, "token id 99; ids are 0 to 34", None),
        ({"input": ["a"] * (MAX_PROMPTS + 1)}, "input has 41 inputs; at most 40", "input"),
        ({"encoding_format": "hex"}, "encoding_format is 'hex'; it must be 'float' or 'base64'", "encoding_format"),
        ({"dimensions": 9}, "dimensions is 9; .* gives 8, 32", None),
        ({"dimensions": "many"}, "dimensions is 'many'", "dimensions"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens is 0; it must be -1 or 1 to 66", None),
        ({"truncation_side": "top"}, "truncation_side is 'top'", None),
        ({"prompt_name": "query"}, "prompt_name is 'query'; the model has none", None),
        ({"embed_dtype": "float16"}, "embed_dtype is 'float16'", "embed_dtype"),
    ],
)
def test_bad_requests(encoder: RunningServer, body: dict[str, Any], message: str, param: str | None) -> None:
    import re

    answer = ask(encoder, **body)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert re.search(message, error["message"])
    assert param is None or error["param"] == param


def test_the_input_is_required_and_the_model_must_be_there(encoder: RunningServer) -> None:
    assert "input is missing" in encoder.post("/v1/embeddings", {"model": "small"}).json()["error"]["message"]
    assert ask(encoder, model="large").status_code == 404


def test_long_inputs_are_cut_on_request(encoder: RunningServer) -> None:
    answer = ask(encoder, input="cat " * 80, truncate_prompt_tokens=-1).json()
    assert answer["usage"]["prompt_tokens"] == 66
    left = ask(encoder, input=[5] * 80 + [6], truncate_prompt_tokens=1, truncation_side="left")
    assert numbers(left) == numbers(ask(encoder, input=[6]))


def test_an_encoder_refuses_to_generate(encoder: RunningServer) -> None:
    for route, body in (("completions", {"prompt": "a"}), ("chat/completions", {"messages": []})):
        answer = encoder.post(f"/v1/{route}", {"model": "small", **body})
        assert answer.status_code == 400
        assert "small makes embeddings only" in answer.json()["error"]["message"]
        assert "/v1/embeddings" in answer.json()["error"]["message"]


def test_metrics_count_inputs_and_tokens(encoder: RunningServer) -> None:
    before = encoder.metrics()
    assert ask(encoder, input=TEXTS).status_code == 200
    tokens = before["vllm:prompt_tokens_total"] + 18
    after = encoder.wait_for(lambda now: now["vllm:prompt_tokens_total"] == tokens)
    assert after["vllm:request_success_total:stop"] - before.get("vllm:request_success_total:stop", 0) == 3
    assert after["vllm:request_prompt_tokens_count"] - before["vllm:request_prompt_tokens_count"] == 3
    assert encoder.get("/load").json()["server_load"] == 0


def test_a_causal_model_serves_both(server: RunningServer, client: openai.OpenAI, tiny_llama: Path) -> None:
    from transformers import AutoModel

    ids = [[5, 6, 7, 8], [9] * 30]
    answer = client.embeddings.create(model="tiny", input=ids)
    model = AutoModel.from_pretrained(tiny_llama, dtype=torch.float32).eval()
    for item, sequence in zip(answer.data, ids, strict=True):
        with torch.inference_mode():
            last = model(input_ids=torch.tensor([sequence])).last_hidden_state[0, -1]
        torch.testing.assert_close(torch.tensor(item.embedding), last / last.norm(), atol=1e-5, rtol=0)
    assert client.completions.create(model="tiny", prompt="Once", max_tokens=2).choices[0].text
    whole = client.embeddings.create(model="tiny", input=[[7] * 512])
    assert whole.usage.prompt_tokens == 512
    with pytest.raises(openai.BadRequestError, match="input has 513 tokens"):
        client.embeddings.create(model="tiny", input=[[7] * 513])
