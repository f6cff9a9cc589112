"""The server's parts one by one."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from octavo.engine.outputs import Logprob
from octavo.errors import UserError
from octavo.server import protocol, refused
from octavo.server.config import ServerConfig
from octavo.server.errors import ApiError, as_api_error
from octavo.server.histogram import PlainHistogram
from octavo.server.limits import Admission, ServerFullError
from octavo.server.logprobs import LogprobFormatter
from octavo.server.params import ParamsBuilder
from octavo.server.parse import parse_request
from octavo.server.replies import EventTemplate, event
from octavo.server.templates import ChatRenderer
from octavo.server.tokens import TextCodec


def sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    pieces = ["<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "\u2581hello", "a", "b", "h"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<s>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")


def test_pieces_are_the_bytes_of_the_text(tokenizer: Any) -> None:
    text = "Grüße, 世界 🎈 a b"
    for codec in (TextCodec(tokenizer), TextCodec(sentencepiece_tokenizer())):
        ids = codec.encode_now(text, add_special_tokens=False)
        assert b"".join(codec.piece(token_id) for token_id in ids).decode() == text
    assert codec.text(codec.tokenizer.convert_tokens_to_ids("\u2581hello")) == " hello"
    assert codec.text(0) == "<s>"


def test_tokens_with_the_same_text_keep_the_better_logprob(tokenizer: Any) -> None:
    codec = TextCodec(tokenizer)
    broken = [token_id for token_id in range(3, 259) if codec.text(token_id) == "\ufffd"][:3]
    position = {broken[1]: Logprob(-2.0, 2), broken[0]: Logprob(-1.0, 1), broken[2]: Logprob(-3.0, 3)}
    shaped = LogprobFormatter(codec).completion([broken[2]], [position], 2, 0)
    assert shaped["top_logprobs"] == [{"\ufffd": -1.0}]
    assert shaped["token_logprobs"] == [-3.0]
    named = LogprobFormatter(codec, as_ids=True).completion([broken[2]], [position], 2, 0)
    assert list(named["top_logprobs"][0]) == [f"token_id:{token_id}" for token_id in broken]


def test_impossible_tokens_have_a_number_that_json_knows(tokenizer: Any) -> None:
    position = {5: Logprob(0.0, 1), 6: Logprob(-float("inf"), 2)}
    shaped = LogprobFormatter(TextCodec(tokenizer)).chat([5], [position], 2)
    assert shaped["content"][0]["top_logprobs"][1]["logprob"] == -9999.0
    json.dumps(shaped, allow_nan=False)


def test_admission_lets_in_as_a_whole_or_not_at_all() -> None:
    rejected: list[None] = []
    admission = Admission(2, 3, lambda: rejected.append(None))
    admission.enter(4)
    with pytest.raises(ServerFullError) as full:
        admission.enter(2)
    assert 1 <= full.value.retry_after <= 60
    assert len(rejected) == 1
    with pytest.raises(ApiError, match="at most 5"):
        admission.enter(6)
    admission.enter(1)
    for _ in range(5):
        admission.leave(time.monotonic() - 1000)
    admission.enter(5)
    with pytest.raises(ServerFullError) as busy:
        admission.check()
    assert busy.value.retry_after == 60


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", 70000),
        ("port", -1),
        ("max_num_queued_reqs", -1),
        ("max_n", 0),
        ("max_logprobs", -2),
        ("stream_interval", 0),
        ("shutdown_timeout", -1.0),
        ("shutdown_timeout", float("nan")),
        ("generation_config", "mine"),
        ("api_key", [""]),
        ("ssl_keyfile", "key.pem"),
    ],
)
def test_settings_name_what_is_wrong(name: str, value: Any) -> None:
    with pytest.raises(UserError) as error:
        ServerConfig(**{name: value})
    assert name in str(error.value)
    assert error.value.param == name


def test_one_key_may_be_given_as_a_string() -> None:
    assert ServerConfig(api_key="k").api_key == ["k"]  # type: ignore[arg-type]


def chat_request(**fields: Any) -> protocol.ChatCompletionRequest:
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}], **fields}).encode()
    return parse_request(body, protocol.ChatCompletionRequest, refused.CHAT).request


def test_templates_come_from_settings_files_or_trusted_requests(tokenizer: Any, tmp_path: Any) -> None:
    (tmp_path / "t.jinja").write_text("file: {{ messages[0].content }} {{ colour }}")
    config = ServerConfig(chat_template=str(tmp_path / "t.jinja"), default_chat_template_kwargs={"colour": "red"})
    renderer = ChatRenderer(tokenizer, config)
    assert renderer.render(chat_request()) == ("file: hi red", [])
    assert renderer.render(chat_request(chat_template_kwargs={"colour": "blue"}))[0] == "file: hi blue"
    with pytest.raises(ApiError, match="trust-request-chat-template"):
        renderer.render(chat_request(chat_template="{{ 1 }}"))
    trusting = ChatRenderer(tokenizer, ServerConfig(chat_template="inline {{ 1 }}", trust_request_chat_template=True))
    assert trusting.render(chat_request())[0] == "inline 1"
    assert trusting.render(chat_request(chat_template="mine {{ 2 }}"))[0] == "mine 2"
    with pytest.raises(UserError, match="chat_template"):
        ChatRenderer(tokenizer, ServerConfig(chat_template=str(tmp_path / "missing")))


def test_templates_run_in_a_sandbox(tokenizer: Any) -> None:
    renderer = ChatRenderer(tokenizer, ServerConfig(trust_request_chat_template=True))
    attack = "{{ messages.__class__.__base__.__subclasses__() }}"
    with pytest.raises(UserError, match="chat template"):
        renderer.render(chat_request(chat_template=attack))


def test_past_tool_calls_reach_the_template_as_objects(tokenizer: Any) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 3}'}}
    template = "{{ messages[1].tool_calls[0].function.arguments.x }}{{ messages[2].content }}"
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {
            "role": "tool",
            "tool_call_id": "1",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        },
    ]
    renderer = ChatRenderer(tokenizer, ServerConfig(chat_template=template))
    assert renderer.render(chat_request(messages=messages))[0] == "3a\nb"
    call["function"]["arguments"] = "{broken"  # type: ignore[index]
    with pytest.raises(ApiError, match="JSON"):
        renderer.render(chat_request(messages=messages))


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.one_of(st.integers(-5, 300), st.text(max_size=2)), max_size=3),
    st.dictionaries(st.text(max_size=3), st.one_of(st.integers(), st.floats()), max_size=2),
)
FIELDS = st.sampled_from(sorted({*protocol.CompletionRequest.__struct_fields__, *refused.COMPLETION, "unknown"}))


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(FIELDS, VALUES, max_size=6))
def test_any_fields_make_parameters_or_an_error_of_the_client(fields: dict[str, Any]) -> None:
    builder = ParamsBuilder(ServerConfig(), {"temperature": 0.5}, 128, 259)
    body = json.dumps({"prompt": "a", **fields}).encode()
    problem: Exception | None = None
    try:
        request = parse_request(body, protocol.CompletionRequest, refused.COMPLETION).request
        requested = builder.requested_tokens(request.max_tokens, "max_tokens", default=16)
        params = builder.build(request, logprobs=request.logprobs, prompt_logprobs=request.prompt_logprobs)
        fitted = builder.fit(params, 10, requested)
    except (ApiError, UserError) as error:  # anything else is a bug
        problem = error
    if problem is None:
        assert 1 <= (fitted.max_tokens or 0) <= 118
        assert fitted.temperature == (0.5 if request.temperature is None else request.temperature)
    else:
        answer = as_api_error(problem)
        assert answer is not None
        assert answer.status == 400
        assert answer.param


@settings(max_examples=100, deadline=None)
@given(
    st.one_of(
        st.binary(max_size=60), st.recursive(VALUES, st.lists, max_leaves=5).map(lambda v: json.dumps(v).encode())
    )
)
def test_any_bytes_are_a_request_or_an_error_of_the_client(body: bytes) -> None:
    status = 200
    try:
        parse_request(body, protocol.CompletionRequest, refused.COMPLETION)
    except ApiError as error:
        status = error.status
    assert status in (200, 400)


@given(st.text(), st.text())
def test_a_template_writes_what_encoding_the_whole_would(model: str, text: str) -> None:
    def chunk(text: str) -> dict[str, Any]:
        return {"model": model, "choices": [{"index": 0, "text": text, "logprobs": None}]}

    assert EventTemplate(chunk).event(text) == event(chunk(text))


@given(st.lists(st.floats(0, 10) | st.sampled_from([0.5, 1, 2.5]), max_size=20))
def test_the_histogram_says_what_prometheus_own_says(values: list[float]) -> None:
    bounds, labels = (0.5, 1, 2.5, 5), {"model_name": "m", "engine": "0"}
    ours, registry = PlainHistogram("x", "text", bounds, tuple(labels), tuple(labels.values())), CollectorRegistry()
    theirs = Histogram("x", "text", tuple(labels), buckets=bounds, registry=registry).labels(*labels.values())
    for value in values:
        ours.observe(value)
        theirs.observe(value)
    (found,), (expected,) = list(ours.collect()), list(registry.collect())
    assert (found.name, found.documentation, found.type) == (expected.name, expected.documentation, expected.type)
    samples = {(s.name, tuple(sorted(s.labels.items()))): s.value for s in expected.samples if "_created" not in s.name}
    assert {(s.name, tuple(sorted(s.labels.items()))): s.value for s in found.samples} == pytest.approx(samples)
