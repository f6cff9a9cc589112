"""The openai package against a real server and engine."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import openai
import pytest
from servers import RunningServer

HELLO = [{"role": "user", "content": "Hello there"}]


def chat(client: openai.OpenAI, **kwargs: Any) -> Any:
    return client.chat.completions.create(**{"model": "tiny", "messages": HELLO, "max_tokens": 12, **kwargs})


def complete(client: openai.OpenAI, **kwargs: Any) -> Any:
    return client.completions.create(**{"model": "tiny", "prompt": "Once upon", "max_tokens": 12, **kwargs})


def test_models(client: openai.OpenAI) -> None:
    models = client.models.list().data
    assert [model.id for model in models] == ["tiny", "alias"]
    assert models[0].max_model_len == 512  # type: ignore[attr-defined]
    assert client.models.retrieve("alias").id == "alias"


def test_chat_answers_with_text_usage_and_reason(client: openai.OpenAI) -> None:
    answer = chat(client)
    choice = answer.choices[0]
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason == "length"
    assert answer.object == "chat.completion"
    assert answer.model == "tiny"
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12


def test_stream_adds_up_to_the_plain_answer(client: openai.OpenAI) -> None:
    plain = chat(client)
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].choices[0].delta.content == ""
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == plain.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == plain.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == plain.usage.prompt_tokens
    assert all(c.usage is None for c in chunks[:-1])
    assert len({c.id for c in chunks}) == 1


def test_continuous_usage_counts_up(client: openai.OpenAI) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(complete(client, stream=True, stream_options=options))
    counts = [c.usage.completion_tokens for c in chunks]
    assert counts == sorted(counts)
    assert set(counts) == set(range(1, 13))


def test_async_client(server: RunningServer, client: openai.OpenAI) -> None:
    async def run() -> tuple[str, str]:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="unused") as asynchronous:
            plain = await asynchronous.chat.completions.create(model="tiny", messages=HELLO, max_tokens=12)  # type: ignore[arg-type]
            stream = await asynchronous.chat.completions.create(
                model="tiny",
                messages=HELLO,  # type: ignore[arg-type]
                max_tokens=12,
                stream=True,
            )
            streamed = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
            return plain.choices[0].message.content or "", streamed

    plain, streamed = asyncio.run(run())
    assert plain == streamed == chat(client).choices[0].message.content


def test_content_as_a_list_of_parts(client: openai.OpenAI) -> None:
    parts = [{"type": "text", "text": "Hello there"}]
    assert chat(client, messages=[{"role": "user", "content": parts}]).choices == chat(client).choices


def test_chat_logprobs(client: openai.OpenAI) -> None:
    answer = chat(client, logprobs=True, top_logprobs=5)
    entries = answer.choices[0].logprobs.content
    assert len(entries) == answer.usage.completion_tokens
    for entry in entries:
        tops = [top.logprob for top in entry.top_logprobs]
        assert len(tops) == 5
        assert tops == sorted(tops, reverse=True)
        assert entry.logprob == tops[0]  # greedy: the token taken is the best one, and the number is the same one
        assert bytes(entry.bytes).decode(errors="replace") == entry.token
        assert math.exp(entry.logprob) <= 1
    text = b"".join(bytes(entry.bytes) for entry in entries).decode(errors="replace")
    assert text == answer.choices[0].message.content


def test_streamed_chat_logprobs_equal_plain_ones(client: openai.OpenAI) -> None:
    plain = chat(client, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    chunks = chat(client, logprobs=True, top_logprobs=2, stream=True)
    streamed = [entry for c in chunks if c.choices[0].logprobs for entry in c.choices[0].logprobs.content]
    assert streamed == plain


def test_logprobs_without_alternatives(client: openai.OpenAI) -> None:
    entries = chat(client, logprobs=True).choices[0].logprobs.content
    assert [entry.top_logprobs for entry in entries] == [[]] * 12


def test_n_answers_differ_and_repeat_with_a_seed(client: openai.OpenAI) -> None:
    first = chat(client, n=3, temperature=1.0, seed=7)
    again = chat(client, n=3, temperature=1.0, seed=7)
    texts = [choice.message.content for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert texts == [choice.message.content for choice in again.choices]
    assert first.usage.completion_tokens == 36


def test_streamed_n_answers_carry_their_index(client: openai.OpenAI) -> None:
    plain = chat(client, n=2, temperature=1.0, seed=11)
    texts, ends = ["", ""], []
    for chunk in chat(client, n=2, temperature=1.0, seed=11, stream=True):
        choice = chunk.choices[0]
        texts[choice.index] += choice.delta.content or ""
        ends += [choice.index] if choice.finish_reason else []
    assert texts == [choice.message.content for choice in plain.choices]
    assert sorted(ends) == [0, 1]


def test_stop_strings_end_the_answer_and_are_cut_off(client: openai.OpenAI, server: RunningServer) -> None:
    allowed = [server.post("/tokenize", {"prompt": c}).json()["tokens"][0] for c in "abcdefgh"]
    kwargs: dict[str, Any] = {
        "temperature": 1.0,
        "seed": 3,
        "max_tokens": 40,
        "extra_body": {"allowed_token_ids": allowed},
    }
    text = complete(client, **kwargs).choices[0].text
    assert len(text) == 40
    stop = text[10:13]
    cut = text[: text.index(stop)]
    choice = complete(client, **kwargs, stop=["zz", stop]).choices[0]
    assert (choice.text, choice.finish_reason, choice.stop_reason) == (cut, "stop", stop)  # type: ignore[attr-defined]
    streamed = list(complete(client, **kwargs, stop=stop, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].text for c in streamed if c.choices) == cut  # nothing of the stop string slipped out
    assert streamed[-1].usage.completion_tokens == len(cut) + len(stop)
    kwargs["extra_body"] = {"allowed_token_ids": allowed, "include_stop_str_in_output": True}
    assert complete(client, **kwargs, stop=stop).choices[0].text == cut + stop
    server.wait_for(lambda m: m["num_requests_running"] == 0)


def test_stop_token_ids(client: openai.OpenAI) -> None:
    kwargs: dict[str, Any] = {"extra_body": {"return_token_ids": True}}
    ids = complete(client, **kwargs).choices[0].token_ids
    stop = ids[5]
    first = ids.index(stop)
    kwargs["extra_body"] = {"return_token_ids": True, "stop_token_ids": [stop]}
    choice = complete(client, **kwargs).choices[0]
    assert choice.token_ids == ids[: first + 1]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)


def test_enable_thinking_reaches_the_template(client: openai.OpenAI, server: RunningServer) -> None:
    body = {"chat_template_kwargs": {"enable_thinking": False}, "return_prompt_text": True}
    answer = chat(client, extra_body=body)
    assert "/no_think" in answer.prompt_text
    body["chat_template_kwargs"] = {"enable_thinking": True}
    assert "/no_think" not in chat(client, extra_body=body).prompt_text
    tokens = server.post("/tokenize", {"messages": HELLO, "chat_template_kwargs": {"enable_thinking": False}}).json()
    assert tokens["count"] == answer.usage.prompt_tokens


def test_continue_final_message(client: openai.OpenAI) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "I am"}]
    body = {"continue_final_message": True, "return_prompt_text": True, "echo": True}
    answer = chat(client, messages=messages, extra_body=body)
    assert answer.prompt_text.endswith("I am")
    assert answer.choices[0].message.content.startswith("I am")


def test_completions_take_text_and_tokens_alone_and_in_lists(client: openai.OpenAI, server: RunningServer) -> None:
    ids = server.post("/tokenize", {"prompt": "Once upon"}).json()["tokens"]
    other = server.post("/tokenize", {"prompt": "A time"}).json()["tokens"]
    text, second = complete(client).choices[0].text, complete(client, prompt="A time").choices[0].text
    assert complete(client, prompt=ids).choices[0].text == text
    for prompts in (["Once upon", "A time"], [ids, other]):
        answer = complete(client, prompt=prompts)
        assert [(c.index, c.text) for c in answer.choices] == [(0, text), (1, second)]
        assert answer.usage.prompt_tokens == len(ids) + len(other)
    answer = complete(client, prompt=["Once upon", "A time"], n=2)
    assert [c.text for c in answer.choices] == [text, text, second, second]


def test_echo_with_logprobs_as_lm_eval_reads_it(client: openai.OpenAI, server: RunningServer) -> None:
    ids = server.post("/tokenize", {"prompt": "The quick brown fox"}).json()["tokens"]
    answer = complete(client, prompt=[ids, ids[:7]], max_tokens=1, temperature=0, logprobs=1, echo=True, seed=1234)
    for choice, prompt in zip(answer.choices, (ids, ids[:7]), strict=True):
        logprobs = choice.logprobs
        assert len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == len(prompt) + 1
        assert logprobs.token_logprobs[0] is None
        assert logprobs.top_logprobs[0] is None
        for i in range(1, len(prompt) + 1):
            assert logprobs.token_logprobs[i] <= max(logprobs.top_logprobs[i].values())
        assert logprobs.token_logprobs[-1] == max(logprobs.top_logprobs[-1].values())
        assert choice.text.startswith("The qui")
    whole, part = (choice.logprobs.token_logprobs[1:7] for choice in answer.choices)
    assert whole == pytest.approx(part, abs=1e-4)
    # Scoring the greedy continuation must find each of its tokens to be the best one, with the identical number.
    greedy = complete(client, prompt=ids, extra_body={"return_token_ids": True}).choices[0].token_ids
    scored = complete(client, prompt=ids + greedy, max_tokens=1, logprobs=1, echo=True).choices[0].logprobs
    for i in range(len(ids), len(ids) + len(greedy)):
        assert scored.token_logprobs[i] == max(scored.top_logprobs[i].values())


def test_echo_alone_generates_nothing(client: openai.OpenAI) -> None:
    answer = complete(client, max_tokens=0, echo=True, logprobs=0)
    assert answer.choices[0].text == "Once upon"
    assert len(answer.choices[0].logprobs.tokens) == answer.usage.prompt_tokens
    assert answer.usage.completion_tokens == 0


def test_streamed_echo_equals_plain_echo(client: openai.OpenAI) -> None:
    kwargs = {"echo": True, "logprobs": 2, "n": 2}
    plain = complete(client, **kwargs)
    texts, probs = ["", ""], [[], []]  # type: ignore[var-annotated]
    for chunk in complete(client, stream=True, **kwargs):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            probs[choice.index] += choice.logprobs.token_logprobs
    assert texts == [choice.text for choice in plain.choices]
    for got, choice in zip(probs, plain.choices, strict=True):
        assert got[1:] == pytest.approx(choice.logprobs.token_logprobs[1:], abs=1e-4)


def test_prompt_logprobs(client: openai.OpenAI) -> None:
    answer = chat(client, extra_body={"prompt_logprobs": 2})
    assert len(answer.prompt_logprobs) == answer.usage.prompt_tokens
    assert answer.prompt_logprobs[0] is None
    assert {"logprob", "rank", "decoded_token"} == set(next(iter(answer.prompt_logprobs[1].values())))


def test_generation_config_sets_defaults_and_requests_win(client: openai.OpenAI) -> None:
    assert complete(client).choices == complete(client).choices  # the server was started with temperature 0
    seeds = {complete(client, temperature=1.5, seed=seed).choices[0].text for seed in range(4)}
    assert len(seeds) > 1


def test_cached_tokens_are_reported(client: openai.OpenAI) -> None:
    prompt = "This sentence has enough bytes to fill several blocks of the cache."
    complete(client, prompt=prompt)
    usage = complete(client, prompt=prompt).usage
    assert 0 < usage.prompt_tokens_details.cached_tokens < usage.prompt_tokens


def test_max_tokens_is_clamped_to_the_room_left(client: openai.OpenAI) -> None:
    answer = complete(client, prompt=[5] * 500, max_tokens=100, extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == 12
    assert answer.choices[0].finish_reason == "length"


def test_errors_are_openai_objects(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        chat(client, model="nobody")
    assert "nobody" in str(missing.value)
    with pytest.raises(openai.BadRequestError) as long:
        complete(client, prompt=[5] * 600)
    assert "512" in str(long.value)
    assert "600" in str(long.value)
    assert long.value.param == "prompt"
    with pytest.raises(openai.BadRequestError) as tools:
        chat(client, tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}])
    assert tools.value.param == "tools"
