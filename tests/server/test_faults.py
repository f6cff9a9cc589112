"""Faults that a real engine does not produce on demand, over a fake engine client."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from fakes import FakeClient
from servers import app_server

from octavo.errors import CapacityError, EngineDeadError, OctavoError
from octavo.server.config import ServerConfig

BODY = {"prompt": "a", "max_tokens": 3}


def read_events(response: httpx.Response) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def wait_until(condition: Any, what: str) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


@pytest.mark.parametrize("stream", [True, False])
def test_the_queue_is_bounded(tokenizer: Any, stream: bool) -> None:
    client = FakeClient(hold=True)  # two run at a time
    with app_server(client, ServerConfig(max_num_queued_reqs=1), tokenizer) as server, ThreadPoolExecutor(3) as pool:
        accepted = [pool.submit(server.post, "/v1/completions", BODY | {"stream": stream}) for _ in range(3)]
        wait_until(lambda: len(client.running) == 3, "three requests were to be accepted")
        refused = server.post("/v1/completions", BODY | {"stream": stream})
        assert refused.status_code == 503
        assert refused.json()["error"]["type"] == "ServiceUnavailableError"
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert server.get("/load").json() == {"server_load": 3}
        assert len(client.requests) == 3
        client.is_held = False
        assert [future.result().status_code for future in accepted] == [200] * 3
        assert server.post("/v1/completions", BODY).status_code == 200
        assert server.metrics()["vllm:admission_rejections_total"] == 1
        never = server.post("/v1/completions", BODY | {"n": 4})
        assert never.status_code == 400
        assert "at most 3" in never.json()["error"]["message"]


def test_the_openai_client_retries_a_full_queue(tokenizer: Any) -> None:
    client = FakeClient(hold=True)
    with app_server(client, ServerConfig(max_num_queued_reqs=0), tokenizer) as server, ThreadPoolExecutor(2) as pool:
        held = [pool.submit(server.post, "/v1/completions", BODY) for _ in range(2)]
        wait_until(lambda: len(client.running) == 2, "two requests were to run")
        threading.Timer(0.3, setattr, (client, "is_held", False)).start()
        sdk = openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=5)
        assert sdk.completions.create(model="fake", prompt="a").choices[0].finish_reason == "length"
        assert [future.result().status_code for future in held] == [200, 200]


def test_an_error_before_the_first_token_has_its_own_status(tokenizer: Any) -> None:
    for error, status in (
        (CapacityError("too big", param="prompt"), 400),
        (OctavoError("the step failed"), 500),
        (RuntimeError("secret detail"), 500),
    ):
        with app_server(FakeClient([error]), ServerConfig(), tokenizer) as server:
            for stream in (True, False):
                response = server.post("/v1/completions", BODY | {"stream": stream})
                assert response.status_code == status
                assert "secret" not in response.text
            assert server.get("/load").json() == {"server_load": 0}


def test_an_error_in_a_stream_is_an_event_and_then_done(tokenizer: Any) -> None:
    client = FakeClient([[100], OctavoError("the step failed")])
    with app_server(client, ServerConfig(), tokenizer) as server:
        response = server.post("/v1/completions", BODY | {"stream": True})
        assert response.status_code == 200
        first, error, done = read_events(response)
        assert first["choices"][0]["finish_reason"] is None
        assert error["error"]["message"] == "the step failed"
        assert done == "[DONE]"
        sdk = openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0)
        with pytest.raises(openai.APIError, match="the step failed"):
            list(sdk.completions.create(model="fake", prompt="a", stream=True))
        assert server.metrics()["vllm:request_success_total:error"] == 2


def test_when_one_of_n_fails_the_others_are_aborted(tokenizer: Any) -> None:
    class OneFails(FakeClient):
        async def generate(self, request_id: str, prompt: Any, params: Any, **options: Any) -> Any:
            if request_id.endswith("-1"):
                raise OctavoError("this one fails")
            async for output in super().generate(request_id, prompt, params, **options):
                yield output

    client = OneFails([[100], 60.0, [101]])
    with app_server(client, ServerConfig(), tokenizer) as server:
        response = server.post("/v1/completions", BODY | {"n": 2})
        assert response.status_code == 500
        assert "this one fails" in response.json()["error"]["message"]
        wait_until(lambda: len(client.aborted) == 1, "the other one was to be aborted")
        assert server.get("/load").json() == {"server_load": 0}


def test_a_dead_engine_turns_health_and_requests_into_503(tokenizer: Any) -> None:
    client = FakeClient([[100], 0.2, EngineDeadError("the engine process ended")])
    with app_server(client, ServerConfig(), tokenizer) as server:
        assert server.get("/health").status_code == 200
        client.is_alive, client.is_dead = False, True
        assert server.get("/health").status_code == 503
        response = server.post("/v1/completions", BODY)
        assert response.status_code == 503
        assert "restart" in response.json()["error"]["message"]


def test_a_slow_client_does_not_hold_the_others_up(tokenizer: Any) -> None:
    client = FakeClient([[100]] * 60_000)  # more than the sockets' buffers take
    with app_server(client, ServerConfig(), tokenizer) as server:
        with httpx.stream("POST", server.url + "/v1/completions", json=BODY | {"stream": True}) as lazy:
            assert lazy.status_code == 200
            client.script = [[100]]
            assert server.post("/v1/completions", BODY).status_code == 200
            assert len(client.running) == 1
        wait_until(lambda: not client.running, "nothing was to be left running")
    assert len(client.aborted) == 1


def test_api_keys(tokenizer: Any) -> None:
    config = ServerConfig(api_key=["key-one", "key-two"])
    with app_server(FakeClient(), config, tokenizer) as server:
        server.headers = {}
        paths = ["/v1/models", "/docs", "/openapi.json", "/tokenizer_info", "/load", "/ping", "/nowhere"]
        for path in paths:
            refused = server.get(path)
            assert refused.status_code == 401
            assert refused.headers["www-authenticate"] == "Bearer"
            assert refused.json()["error"]["code"] == "invalid_api_key"
        for path in ("/health", "/version", "/metrics"):
            assert server.get(path).status_code == 200
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "//v1/completions"):
            assert server.post(path, BODY).status_code == 401
        for wrong in ("Bearer", "Bearer key-on", "Bearer key-one2", "Basic key-one", "key-one"):
            assert server.post("/v1/completions", BODY, {"Authorization": wrong}).status_code == 401
        for right in ("Bearer key-one", "bearer key-two"):
            assert server.post("/v1/completions", BODY, {"Authorization": right}).status_code == 200
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=server.url + "/v1", api_key="wrong").models.list()
        assert openai.OpenAI(base_url=server.url + "/v1", api_key="key-two").models.list().data


def test_metrics_can_be_protected(tokenizer: Any) -> None:
    with app_server(FakeClient(), ServerConfig(api_key=["k"], protect_metrics=True), tokenizer) as server:
        assert server.get("/metrics").status_code == 200
        server.headers = {}
        assert server.get("/metrics").status_code == 401
        assert server.get("/health").status_code == 200


def test_browsers_are_let_in_only_from_listed_origins(tokenizer: Any) -> None:
    preflight = {"Origin": "http://page.example", "Access-Control-Request-Method": "POST"}
    config = ServerConfig(api_key=["k"], allowed_origins=["http://page.example"])
    with app_server(FakeClient(), config, tokenizer) as server:
        answer = httpx.options(server.url + "/v1/completions", headers=preflight)
        assert answer.headers["access-control-allow-origin"] == "http://page.example"
        other = httpx.options(server.url + "/v1/completions", headers=preflight | {"Origin": "http://other.example"})
        assert "access-control-allow-origin" not in other.headers


def test_strict_params_refuses_what_nobody_defines(tokenizer: Any) -> None:
    with app_server(FakeClient(), ServerConfig(strict_params=True), tokenizer) as server:
        error = server.post("/v1/completions", BODY | {"flavour": 1})
        assert error.status_code == 400
        assert error.json()["error"]["param"] == "flavour"
        assert server.post("/v1/completions", BODY).status_code == 200


def test_bodies_are_bounded(tokenizer: Any) -> None:
    with app_server(FakeClient(), ServerConfig(max_body_bytes=1000), tokenizer) as server:
        response = server.post("/v1/completions", {"prompt": "a" * 2000})
        assert response.status_code == 413
        assert "1000" in response.json()["error"]["message"]

        def chunks() -> Any:
            for _ in range(50):
                yield b" " * 100

        assert httpx.post(server.url + "/v1/completions", content=chunks()).status_code == 413
        assert server.post("/v1/completions", BODY).status_code == 200


def test_forced_usage(tokenizer: Any) -> None:
    with app_server(FakeClient(), ServerConfig(enable_force_include_usage=True), tokenizer) as server:
        chunks = read_events(server.post("/v1/completions", BODY | {"stream": True}))
        assert all("usage" in chunk for chunk in chunks[:-1])
        assert chunks[-2]["choices"] == []


def test_without_a_tokenizer_token_ids_still_work() -> None:
    with app_server(FakeClient(), ServerConfig(), None) as server:
        answer = server.post("/v1/completions", {"prompt": [5], "return_token_ids": True, "logprobs": None}).json()
        assert answer["choices"][0]["token_ids"] == [100, 101, 102]
        for path, body in (("/v1/completions", BODY), ("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
            error = server.post(path, body)
            assert error.status_code == 400
            assert "tokenizer" in error.json()["error"]["message"]
        chat = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]})
        assert "tokenizer" in chat.json()["error"]["message"]


def test_what_the_engine_is_asked_for(tokenizer: Any) -> None:
    generation = {"temperature": 0.6, "top_k": 20, "max_new_tokens": 50, "do_sample": True}
    client = FakeClient(generation_config=generation)
    with app_server(client, ServerConfig(override_generation_config={"top_k": 30}), tokenizer) as server:
        server.post(
            "/v1/completions", {"prompt": "a", "top_p": 0.5, "priority": 3, "cache_salt": "s", "max_tokens": 100}
        )
        chat = {"messages": [{"role": "user", "content": "a"}], "temperature": 0.1, "seed": 5, "n": 2}
        server.post("/v1/chat/completions", chat)
    _, prompt, params, options = client.requests[0]
    assert (params.temperature, params.top_k, params.top_p, params.max_tokens) == (0.6, 30, 0.5, 50)
    assert (options["priority"], options["cache_salt"]) == (3, "s")
    assert prompt == tokenizer.encode("a")
    children = [request[2] for request in client.requests[1:]]
    assert sorted((child.n, child.seed, child.temperature) for child in children) == [(1, 5, 0.1), (1, 6, 0.1)]
    client = FakeClient(generation_config=generation)
    with app_server(client, ServerConfig(generation_config="octavo"), tokenizer) as server:
        server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]})
    params = client.requests[0][2]
    assert (params.temperature, params.top_k) == (1.0, 0)
    assert params.max_tokens == 128 - len(client.requests[0][1])
