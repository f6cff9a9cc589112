from __future__ import annotations

from typing import Any

import msgspec
import pytest

from octavo.core.sampling_params import SamplingParams
from octavo.errors import UserError


def test_defaults_are_vllms() -> None:
    params = SamplingParams()
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1.0, 1.0, 0, 0.0)
    assert (params.max_tokens, params.min_tokens, params.n, params.repetition_penalty) == (16, 0, 1, 1.0)
    assert params.detokenize
    assert params.skip_special_tokens
    assert params.spaces_between_special_tokens
    assert not params.include_stop_str_in_output
    assert not params.is_greedy
    assert SamplingParams(temperature=0).is_greedy


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("n", 0, "at least 1"),
        ("n", True, "at least 1"),
        ("presence_penalty", 2.1, "from -2 to 2"),
        ("frequency_penalty", -3, "from -2 to 2"),
        ("repetition_penalty", 0, "above 0"),
        ("temperature", -0.1, "at least 0"),
        ("temperature", float("nan"), "at least 0"),
        ("temperature", "hot", "at least 0"),
        ("top_p", 0, "above 0 and at most 1"),
        ("top_p", 1.5, "above 0 and at most 1"),
        ("top_k", -2, "at least -1"),
        ("top_k", 1.5, "an integer"),
        ("min_p", 1.1, "from 0 to 1"),
        ("max_tokens", -5, "at least 1"),
        ("max_tokens", 0, "at least 1"),
        ("min_tokens", -1, "at least 0"),
        ("min_tokens", 17, "at most max_tokens, which is 16"),
        ("logprobs", -2, "at least -1"),
        ("prompt_logprobs", "all", "at least -1"),
        ("seed", 1.5, "64 bits"),
        ("seed", 1 << 64, "64 bits"),
        ("stop", "", "not empty"),
        ("stop", ["a", ""], "not empty"),
        ("stop", 5, "a string"),
        ("stop_token_ids", [-1], "token ids"),
        ("stop_token_ids", ["1"], "token ids"),
        ("allowed_token_ids", [], "at least one"),
        ("bad_words", [""], "not empty"),
        ("logit_bias", {1: 101}, "-100 to 100"),
        ("logit_bias", {-1: 1.0}, "-100 to 100"),
        ("logit_bias", [1], "-100 to 100"),
        ("truncate_prompt_tokens", 0, "at least 1"),
        ("truncate_prompt_tokens", -2, "at least -1"),
        ("ignore_eos", 1, "true or false"),
    ],
)
def test_a_bad_value_is_refused_with_its_range(name: str, value: Any, says: str) -> None:
    with pytest.raises(UserError, match=says) as error:
        SamplingParams(**{name: value})
    assert error.value.param == name
    assert name in str(error.value)


def test_an_unknown_keyword_is_an_error() -> None:
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1.0)  # type: ignore[call-arg]


def test_stop_strings_need_text() -> None:
    with pytest.raises(UserError, match="stop_token_ids"):
        SamplingParams(stop="x", detokenize=False)


def test_stop_and_bias_are_normalized() -> None:
    params = SamplingParams(stop="end", logit_bias={"7": 3})  # type: ignore[dict-item]
    assert params.stop == params.stop_strings == ["end"]
    assert params.logit_bias == {7: 3.0}


def test_it_travels_through_msgspec() -> None:
    params = SamplingParams(stop=["a"], logit_bias={3: 1.5}, max_tokens=None, seed=-1, stop_token_ids=[4], logprobs=5)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(b'{"max_tokens": -1}', type=SamplingParams)


def test_truncation_keeps_the_end_of_the_prompt() -> None:
    prompt = list(range(10))
    assert SamplingParams().truncate(prompt, 4) == prompt
    assert SamplingParams(truncate_prompt_tokens=3).truncate(prompt, 4) == [7, 8, 9]
    assert SamplingParams(truncate_prompt_tokens=-1).truncate(prompt, 6) == [5, 6, 7, 8, 9]  # room for one new token
    assert SamplingParams(truncate_prompt_tokens=30).truncate(prompt, 4) == prompt


def test_replace_checks_again() -> None:
    params = SamplingParams(max_tokens=8)
    assert params.replace(n=2).n == 2
    with pytest.raises(UserError):
        params.replace(top_p=2.0)
