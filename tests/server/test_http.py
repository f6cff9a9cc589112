"""What clients that are no SDK see: raw bodies, headers, metrics, and connections that close early."""

from __future__ import annotations

import json
import math
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from servers import RunningServer

LONG = {"prompt": [7] * 16, "max_tokens": 490, "ignore_eos": True}


def events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def error_of(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return dict(error)


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"prompt": ""}, "prompt", ["empty"]),
        ({"prompt": []}, "prompt", ["empty"]),
        ({"prompt": [[]]}, "prompt", ["empty"]),
        ({}, "prompt", ["missing"]),
        ({"prompt": 5}, "prompt", ["5", "text"]),
        ({"prompt": ["a", 5]}, "prompt", ["prompt[1]", "5"]),
        ({"prompt": [1, 2**40]}, "prompt", [str(2**40), "258"]),
        ({"prompt": [-1]}, "prompt", ["-1", "0 to 258"]),
        ({"prompt": "a", "max_tokens": -3}, "max_tokens", ["-3", "1 to 512"]),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens", ["0", "1 to 512"]),
        ({"prompt": "a", "max_tokens": 10**12}, "max_tokens", [str(10**12), "512"]),
        ({"prompt": "a", "max_tokens": "many"}, "max_tokens", ["many"]),
        ({"prompt": "a", "temperature": -1}, "temperature", ["-1", "at least 0"]),
        ({"prompt": "a", "temperature": math.nan}, "temperature", ["nan", "at least 0"]),
        ({"prompt": "a", "top_p": 0}, "top_p", ["0", "above 0"]),
        ({"prompt": "a", "top_p": math.inf}, "top_p", ["inf"]),
        ({"prompt": "a", "n": 0}, "n", ["0", "1 to 128"]),
        ({"prompt": "a", "n": 10**9}, "n", [str(10**9), "128"]),
        ({"prompt": "a", "seed": 2**70}, "seed", ["64"]),
        ({"prompt": "a", "logprobs": 21}, "logprobs", ["21", "0 to 20"]),
        ({"prompt": "a", "stop": ["x"] * 65}, "stop", ["65", "64"]),
        ({"prompt": "a", "stop": ""}, "stop", ["1 to 1024"]),
        ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias", ["x", "258"]),
        ({"prompt": "a", "logit_bias": {"1": 101}}, "logit_bias", ["101", "-100 to 100"]),
        ({"prompt": "a", "allowed_token_ids": []}, "allowed_token_ids", ["0 entries"]),
        ({"prompt": "a", "stop_token_ids": [999]}, "stop_token_ids", ["999", "258"]),
        ({"prompt": "a", "best_of": 3}, "best_of", ["3"]),
        ({"prompt": "a", "suffix": "b"}, "suffix", ["b"]),
        ({"prompt": "a", "response_format": {"type": "json_object"}}, "response_format", ["json_object"]),
        ({"prompt": "a", "guided_json": {}}, "guided_json", []),
        ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options", ["stream"]),
        ({"prompt": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens", ["-2"]),
        ({"prompt": "a", "truncation_side": "middle"}, "truncation_side", ["middle"]),
        ({"prompt": "a", "priority": 2**40}, "priority", [str(2**40)]),
        ({"prompt": "a", "cache_salt": "x" * 129}, "cache_salt", ["129", "128"]),
        ({"prompt": ["a"] * 2049}, "prompt", ["2049", "2048"]),
    ],
)
def test_bad_completions_name_the_value_and_the_range(
    server: RunningServer, body: dict[str, Any], param: str, words: list[str]
) -> None:
    error = error_of(server.post("/v1/completions", body))
    assert error["param"] == param
    assert error["type"] == "BadRequestError"
    for word in [param, *words]:
        assert word in error["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"content": "hi"}]}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
        ({"top_logprobs": 5}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"store": True}, "store"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"chat_template": "{{ messages }}"}, "chat_template"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"kv_transfer_params": {"do_remote_decode": True}}, "kv_transfer_params"),
    ],
)
def test_bad_chats_name_the_parameter(server: RunningServer, body: dict[str, Any], param: str) -> None:
    base = {} if "messages" in body or not body else {"messages": [{"role": "user", "content": "hi"}]}
    error = error_of(server.post("/v1/chat/completions", base | body))
    assert error["param"] == param
    assert param.partition(".")[0] in error["message"]


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'"x"', b'{"prompt": "\\ud800"}', b"[" * 100_000, b"\xff\xfe"])
def test_bodies_that_are_no_object(server: RunningServer, body: bytes) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        error_of(server.post(path, body))


def test_errors_stay_small(server: RunningServer) -> None:
    for body in (
        {"prompt": {"x" * 10**6: 1}},
        {"prompt": "a", "stop": {"y": "z" * 10**6}},
        {"model": "m" * 10**6, "prompt": "a"},
    ):
        response = server.post("/v1/completions", body)
        assert response.status_code in (400, 404)
        assert len(response.content) < 4000


def test_neutral_values_of_what_is_not_honoured_are_accepted(server: RunningServer) -> None:
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 2,
        "audio": None,
        "response_format": {"type": "text"},
        "tools": None,
        "tool_choice": "none",
        "parallel_tool_calls": True,
        "user": "me",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "modalities": ["text"],
        "kv_transfer_params": None,
        "include_reasoning": True,
        "continue_final_message": False,
    }
    response = server.post("/v1/chat/completions", body)
    assert response.status_code == 200
    assert "x-octavo-ignored" not in response.headers


def test_names_that_nobody_defines_are_ignored_and_reported(server: RunningServer) -> None:
    body = {
        "prompt": "a",
        "max_tokens": 2,
        "no_stop_trim": False,
        "return_hidden_states": True,
        "evil\r\nname": 1,
        "stream_options": {"flavour": 1},
        "stream": True,
    }
    response = server.post("/v1/completions", body)
    assert response.status_code == 200
    assert response.headers["x-octavo-ignored"] == "no_stop_trim, return_hidden_states, ?, stream_options.flavour"
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "chat_template_kwargs": {"colour": 1}}
    assert server.post("/v1/chat/completions", chat).headers["x-octavo-ignored"] == "chat_template_kwargs.colour"


def test_request_ids_are_honoured_even_twice_at_once(server: RunningServer) -> None:
    def ask(_: int) -> httpx.Response:
        return server.post("/v1/completions", {"prompt": "a", "max_tokens": 20}, {"X-Request-Id": "my-id"})

    with ThreadPoolExecutor(3) as pool:
        for response in pool.map(ask, range(3)):
            assert response.headers["x-request-id"] == "my-id"
            assert response.json()["id"] == "cmpl-my-id"


def test_event_stream_format(server: RunningServer) -> None:
    body = {"prompt": "a", "max_tokens": 3, "stream": True}
    response = server.post("/v1/completions", body)
    assert response.headers["content-type"].startswith("text/event-stream")
    chunks = events(response.text)
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "length"]
    assert all("usage" not in chunk for chunk in chunks)


def test_stream_interval_gathers_tokens(server: RunningServer) -> None:
    body = {"prompt": "a", "max_tokens": 11, "stream": True, "stream_interval": 4, "return_token_ids": True}
    chunks = events(server.post("/v1/completions", body).text)
    assert [len(chunk["choices"][0]["token_ids"]) for chunk in chunks] == [1, 4, 4, 2]


def test_truncated_prompts(server: RunningServer) -> None:
    ids = list(range(3, 50))
    for extra, kept in (
        ({"truncate_prompt_tokens": 5}, ids[-5:]),
        ({"truncate_prompt_tokens": 5, "truncation_side": "right"}, ids[:5]),
        ({"truncate_prompt_tokens": -1}, ids),
    ):
        body = {"prompt": ids, "max_tokens": 1, "return_token_ids": True, **extra}
        assert server.post("/v1/completions", body).json()["choices"][0]["prompt_token_ids"] == kept
    assert server.post(
        "/v1/completions", {"prompt": [9] * 600, "max_tokens": 1, "truncate_prompt_tokens": -1}
    ).is_success


def test_tokenize_and_back(server: RunningServer) -> None:
    text = "Grüße, 世界 <|im_end|>"
    answer = server.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 512
    assert answer["tokens"][-1] == 2  # a special token in the text is that token
    assert server.post("/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": text}
    error_of(server.post("/detokenize", {"tokens": [259]}))
    error_of(server.post("/tokenize", {}))


def test_tokenizer_info_and_render(server: RunningServer) -> None:
    info = server.get("/tokenizer_info").json()
    assert info["eos_token"] == "<|end|>"
    assert "enable_thinking" in info["chat_template"]
    messages = [{"role": "user", "content": "hi"}]
    tokens = server.post("/tokenize", {"messages": messages}).json()["tokens"]
    assert server.post("/v1/chat/completions/render", {"messages": messages}).json()["token_ids"] == tokens
    rendered = server.post("/v1/completions/render", {"prompt": ["a", "b"]}).json()
    assert [item["token_ids"] for item in rendered] == [
        server.post("/tokenize", {"prompt": c}).json()["tokens"] for c in "ab"
    ]


def test_status_routes(server: RunningServer) -> None:
    assert server.get("/health").status_code == 200
    assert server.get("/ping").status_code == 200
    assert server.get("/version").json()["version"]
    assert server.get("/load").json() == {"server_load": 0}
    docs = server.get("/docs")
    assert "/v1/chat/completions" in docs.text
    assert "max_completion_tokens" in docs.text
    assert "http://" not in docs.text
    assert "https://" not in docs.text
    assert "ChatCompletionRequest" in server.get("/openapi.json").json()["components"]["schemas"]
    assert "nowhere" in error_of(server.get("/nowhere"), 404)["message"]
    error_of(server.get("/v1/completions"), 405)


def test_shared_prefix_and_running_requests_show_in_the_metrics(server: RunningServer) -> None:
    system = {"role": "system", "content": "You are a patient librarian. " * 6}
    before = server.metrics()
    most_running = 0.0
    done = threading.Event()

    def watch() -> None:
        nonlocal most_running
        while not done.is_set():
            most_running = max(most_running, server.metrics()["num_requests_running"])

    def ask(i: int) -> httpx.Response:
        question = {"role": "user", "content": f"Question {i}"}
        return server.post(
            "/v1/chat/completions", {"messages": [system, question], "max_tokens": 200, "ignore_eos": True}
        )

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with ThreadPoolExecutor(5) as pool:
            answers = list(pool.map(ask, range(5)))
    finally:
        done.set()
        watcher.join()
    after = server.wait_for(lambda m: m["num_requests_running"] == 0)
    prompt_tokens = sum(answer.json()["usage"]["prompt_tokens"] for answer in answers)
    assert most_running > 1
    assert after["prompt_tokens_total"] - before["prompt_tokens_total"] == prompt_tokens
    assert after["generation_tokens_total"] - before["generation_tokens_total"] == 1000
    assert after["prefix_cache_queries_total"] - before["prefix_cache_queries_total"] == prompt_tokens
    assert after["prefix_cache_hits_total"] - before["prefix_cache_hits_total"] >= 4 * 160
    for name in ("num_requests_running", "kv_cache_usage_perc", "gpu_cache_usage_perc", "prompt_tokens_total"):
        assert after[f"vllm:{name}"] == after[name]
    assert after["vllm:request_success_total:length"] - before.get("vllm:request_success_total:length", 0) == 5


def raw_request(server: RunningServer, path: str, body: dict[str, Any]) -> socket.socket:
    """A request whose connection the test holds in its hands."""
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=30)
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: test\r\nContent-Length: {len(content)}\r\n\r\n"
    connection.sendall(head.encode() + content)
    return connection


def read_until(connection: socket.socket, mark: bytes) -> None:
    received = b""
    while mark not in received:
        part = connection.recv(65536)
        assert part, received
        received += part


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_goes_away_aborts_its_requests(server: RunningServer, stream: bool, n: int) -> None:
    before = server.wait_for(lambda m: m["num_requests_running"] == 0)
    connection = raw_request(server, "/v1/completions", {**LONG, "stream": stream, "n": n, "temperature": 1.0})
    if stream:
        read_until(connection, b"data: ")
    else:
        server.wait_for(lambda m: m["num_requests_running"] > 0)
    connection.close()
    after = server.wait_for(lambda m: m["num_requests_running"] == 0 and m["num_requests_waiting"] == 0)
    aborted = "vllm:request_success_total:abort"
    assert after.get(aborted, 0) - before.get(aborted, 0) == n
    assert after["generation_tokens_total"] - before["generation_tokens_total"] < n * LONG["max_tokens"]  # type: ignore[operator]
    time.sleep(0.7)  # longer than the engine's idle report
    assert server.metrics()["generation_tokens_total"] == after["generation_tokens_total"]
    assert server.metrics()["kv_cache_usage_perc"] == 0


def test_a_waiting_request_can_go_away_too(server: RunningServer) -> None:
    """16 requests run; the 17th waits and its client leaves."""
    server.wait_for(lambda m: m["num_requests_running"] == 0)
    running = raw_request(server, "/v1/completions", {**LONG, "stream": True, "n": 16})
    read_until(running, b"data: ")
    waiting = raw_request(server, "/v1/completions", {**LONG, "prompt": [8] * 16})
    server.wait_for(lambda m: m["num_requests_waiting"] == 1)
    waiting.close()
    samples = server.wait_for(lambda m: m["num_requests_waiting"] == 0)
    assert samples["num_requests_running"] == 16
    running.close()
    server.wait_for(lambda m: m["num_requests_running"] == 0)


def test_one_bad_request_among_good_ones_disturbs_nobody(server: RunningServer) -> None:
    good = {"prompt": "a", "max_tokens": 60, "ignore_eos": True}
    expected = server.post("/v1/completions", good).json()["choices"]

    def ask(i: int) -> httpx.Response:
        return server.post("/v1/completions", good if i % 2 else {"prompt": [5] * (600 + i)})

    with ThreadPoolExecutor(6) as pool:
        for i, response in enumerate(pool.map(ask, range(12))):
            if i % 2:
                assert response.json()["choices"] == expected
            else:
                assert str(600 + i) in error_of(response)["message"]
