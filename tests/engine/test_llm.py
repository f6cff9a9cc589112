"""`LLM` against transformers on a small random model: the same tokens, whatever the engine does in between."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.engine.config import EngineConfig
from octavo.engine.memory import step_limits
from octavo.errors import CapacityError, CheckpointError, ModelNotFoundError, UserError

PROMPTS = ["Hello there", "The quick brown fox jumps over the lazy dog. " * 4, "a", "1 2 3 4 5 6 7 8 9"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def reference(tiny_llama: Path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(tiny_llama)


@pytest.fixture(scope="module")
def llm(tiny_llama: Path) -> LLM:
    return LLM(str(tiny_llama), dtype="float32")


def continuation(reference, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens by transformers, without its generate loop."""
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            ids.append(int(reference[0](torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.fixture(scope="module")
def expected(reference) -> list[list[int]]:
    return [continuation(reference, reference[1].encode(p), 24) for p in PROMPTS]


def tokens(outputs) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in outputs]


def test_greedy_equals_transformers(llm: LLM, expected) -> None:
    assert tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected


@pytest.mark.parametrize(
    "kwargs",
    [
        {"max_num_batched_tokens": 16, "max_num_seqs": 4},  # chunked prefill, mixed with decodes
        {"max_prefill_tokens_with_decodes": 3},
        {"target_itl_ms": 0.001},  # the least cap
        {"max_num_seqs": 1},
        {"enable_prefix_caching": False},
        {"block_size": 8},
        {"kv_cache_memory_bytes": 20 * 16 * 512, "max_model_len": 300, "max_num_seqs": 4},  # too small: preemption
        {"model_impl": "transformers"},
    ],
    ids=lambda kwargs: ",".join(kwargs),
)
def test_the_engine_settings_do_not_change_the_tokens(tiny_llama: Path, expected, kwargs) -> None:
    with LLM(str(tiny_llama), dtype="float32", **kwargs) as llm:
        assert tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected
        if "kv_cache_memory_bytes" in kwargs:
            assert llm.engine.stats().preemptions > 0
        assert tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected


def test_requests_of_one_step_and_of_later_ones_share_a_prefix(llm: LLM, expected) -> None:
    prompt = "A common beginning that is longer than some blocks. " * 3
    params = SamplingParams(temperature=0.0, max_tokens=4)
    outputs = llm.generate([prompt + end for end in "abc"], params, use_tqdm=False)
    assert [o.num_cached_tokens > 100 for o in outputs] == [False, True, True]
    again = llm.generate(prompt + "a", params, use_tqdm=False)[0]
    assert again.num_cached_tokens > 100
    assert again.outputs[0].token_ids == outputs[0].outputs[0].token_ids


def test_logprobs_equal_transformers(llm: LLM, reference) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, logprobs=4, prompt_logprobs=2)
    output = llm.generate(PROMPTS[1], params, use_tqdm=False)[0]
    ids = output.prompt_token_ids + output.outputs[0].token_ids
    with torch.inference_mode():
        logprobs = reference[0](torch.tensor([ids])).logits[0].log_softmax(-1)
    assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
    entries = output.prompt_logprobs[1:] + (output.outputs[0].logprobs or [])
    assert len(entries) == len(ids) - 1
    for position, entry in enumerate(entries):
        assert entry is not None
        token = ids[position + 1]
        assert entry[token].logprob == pytest.approx(float(logprobs[position, token]), abs=1e-3)
        assert entry[token].rank == int((logprobs[position] > logprobs[position, token]).sum()) + 1
        best = int(logprobs[position].argmax())
        assert entry[best].rank == 1 and entry[best].decoded_token == reference[1].decode([best])
    total = sum(e[t].logprob for t, e in zip(output.outputs[0].token_ids, entries[-5:], strict=True))
    assert output.outputs[0].cumulative_logprob == pytest.approx(total)


def test_prompt_logprobs_survive_chunking_and_cached_prefixes(tiny_llama: Path, llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    whole = llm.generate(PROMPTS[1], params, use_tqdm=False)[0].prompt_logprobs
    with LLM(str(tiny_llama), dtype="float32", max_num_batched_tokens=10, max_num_seqs=2) as small:
        small.generate(PROMPTS[1], GREEDY, use_tqdm=False)
        chunked = small.generate(PROMPTS[1], params, use_tqdm=False)[0].prompt_logprobs
    assert whole is not None and chunked is not None and len(whole) == len(chunked)
    for a, b in zip(whole[1:], chunked[1:], strict=True):
        assert a is not None and b is not None and a.keys() == b.keys()
        for token in a:
            assert a[token].logprob == pytest.approx(b[token].logprob, abs=1e-3)


def test_n_answers_with_a_seed_are_reproducible_and_differ(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=5, temperature=1.5, max_tokens=8, ignore_eos=True)
    first = llm.generate("Once", params, use_tqdm=False)[0]
    second = llm.generate(["Twice", "Once"], [SamplingParams(max_tokens=3), params], use_tqdm=False)[1]
    assert [o.token_ids for o in first.outputs] == [o.token_ids for o in second.outputs]
    assert len({tuple(o.token_ids) for o in first.outputs}) == 3
    assert [o.index for o in first.outputs] == [0, 1, 2]


def test_stop_string_ends_the_answer(llm: LLM) -> None:
    free = llm.generate("Hello there", GREEDY, use_tqdm=False)[0].outputs[0]
    stop = free.text[4:6]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, stop=stop)
    stopped = llm.generate("Hello there", params, use_tqdm=False)[0].outputs[0]
    assert stopped.text == free.text[: free.text.find(stop)]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)
    assert len(stopped.token_ids) < len(free.token_ids)
    assert not llm.engine.has_work


def test_stop_token_and_length(llm: LLM) -> None:
    free = llm.generate("Hello there", GREEDY, use_tqdm=False)[0].outputs[0]
    assert free.finish_reason == "length" and len(free.token_ids) == 24
    stop = free.token_ids[3]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, stop_token_ids=[stop])
    stopped = llm.generate("Hello there", params, use_tqdm=False)[0].outputs[0]
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)


def test_chat_renders_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    output = llm.chat(messages, SamplingParams(max_tokens=2), use_tqdm=False)[0]
    assert output.prompt == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    quiet = llm.chat([messages], use_tqdm=False, chat_template_kwargs={"enable_thinking": False})[0]
    assert "/no_think" in (quiet.prompt or "")


def test_chat_takes_text_parts(llm: LLM) -> None:
    parts = [{"type": "text", "text": "Hi"}, {"type": "text", "text": "there"}]
    prompts = [
        llm.chat([{"role": "user", "content": content}], use_tqdm=False)[0].prompt for content in (parts, "Hi\nthere")
    ]
    assert prompts[0] == prompts[1]


def test_prompt_forms(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=3)
    ids = llm.get_tokenizer().encode("Hello there")
    forms = ["Hello there", {"prompt": "Hello there"}, ids, {"prompt_token_ids": ids}, ["Hello there"], [ids]]
    answers = {tuple(llm.generate(form, params, use_tqdm=False)[0].outputs[0].token_ids) for form in forms}
    assert len(answers) == 1


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda llm: llm.generate("", use_tqdm=False), ["empty"]),
        (lambda llm: llm.generate([[1] * 600], use_tqdm=False), ["600", "512"]),
        (lambda llm: llm.generate([[1, 999999]], use_tqdm=False), ["999999", "259"]),
        (lambda llm: llm.generate("x", SamplingParams(max_tokens=-3), use_tqdm=False), ["max_tokens", "-3"]),
        (lambda llm: llm.generate("x", SamplingParams(logit_bias={70000: 1.0}), use_tqdm=False), ["70000"]),
        (lambda llm: llm.generate(["x", "y"], [SamplingParams()], use_tqdm=False), ["1", "2"]),
        (lambda llm: llm.generate(None, use_tqdm=False), ["None", "a list of prompts"]),
        (lambda llm: llm.chat([], use_tqdm=False), ["empty"]),
        (lambda llm: llm.chat(None, use_tqdm=False), ["None", "role"]),
        (lambda llm: llm.chat(["Hi"], use_tqdm=False), ["Hi", "role"]),
        (lambda llm: llm.chat([{"role": "user", "content": [{"type": "image_url"}]}], use_tqdm=False), ["image_url"]),
    ],
)
def test_bad_input_names_the_value_and_disturbs_nothing(llm: LLM, call, words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        call(llm)
    assert all(word in str(caught.value) for word in words), caught.value
    assert not llm.engine.has_work
    assert len(llm.generate("still fine", GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 24


def test_bad_settings_name_the_value_and_the_way_out(tiny_llama: Path) -> None:
    with pytest.raises(CapacityError, match="max_model_len = 512"):
        LLM(str(tiny_llama), kv_cache_memory_bytes=20000)
    with LLM(str(tiny_llama), kv_cache_memory_bytes=100000, max_model_len="auto") as llm:
        assert 16 <= llm.engine.info.max_model_len < 512
    with pytest.raises(UserError, match="100000"):
        LLM(str(tiny_llama), max_model_len=100000)
    with pytest.raises(ModelNotFoundError, match="no-such-model"):
        LLM("./no-such-model")
    with pytest.raises(TypeError, match="max_modle_len"):
        LLM(str(tiny_llama), max_modle_len=5)
    with pytest.raises(UserError, match="tensor_parallel_size is 2"):
        LLM(str(tiny_llama), tensor_parallel_size=2)
    with pytest.raises(UserError, match="max_num_batched_tokens is 4; it must be at least max_num_seqs = 8"):
        LLM(str(tiny_llama), max_num_batched_tokens=4, max_num_seqs=8)
    with pytest.raises(UserError, match="dtype is 'fp4'; it must be one of auto, float32"):
        LLM(str(tiny_llama), dtype="fp4")
    with pytest.raises(CapacityError, match=r"of 10 bytes holds a sequence of 0 tokens.* at least \d+$"):
        LLM(str(tiny_llama), kv_cache_memory_bytes=10)


@pytest.mark.parametrize(
    ("given", "limits"),
    [
        ({}, (64, 2048)),
        ({"max_num_batched_tokens": 16}, (16, 16)),
        ({"max_num_seqs": 3000}, (3000, 3000)),
        ({"max_num_batched_tokens": 100, "max_num_seqs": 2}, (2, 100)),
    ],
)
def test_a_limit_that_is_given_is_kept_and_the_other_default_gives_way(given, limits) -> None:
    found = step_limits(EngineConfig(**given), torch.device("cpu"))
    assert found.max_prefill_tokens_with_decodes is None
    assert step_limits(EngineConfig(**given), torch.device("cpu"), is_serving=True).max_prefill_tokens_with_decodes
    assert (found.max_num_seqs, found.max_num_batched_tokens) == limits


@pytest.mark.parametrize(
    ("given", "device", "number", "ends"),
    [
        ({}, "cpu", 64, None),
        ({}, "cuda", None, (512, 2048)),
        ({"target_itl_ms": 20.0}, "cpu", None, None),
        ({"max_prefill_tokens_with_decodes": 300}, "cuda", 300, (512, 2048)),  # the number wins
    ],
)
def test_a_servers_cap_on_prefills_depends_on_the_device(given, device, number, ends) -> None:
    limits = step_limits(EngineConfig(**given), torch.device(device), is_serving=True)
    assert (limits.max_prefill_tokens_with_decodes, limits.prefill_cap_range) == (number, ends)


@pytest.mark.parametrize("quantization", ["int8", "w4a16"])
def test_a_plain_checkpoint_is_quantized_while_loading(tiny_llama: Path, quantization: str) -> None:
    with LLM(str(tiny_llama), dtype="float32") as llm:
        plain = llm.engine.info.weight_bytes
    with LLM(str(tiny_llama), dtype="float32", quantization=quantization) as llm:
        assert llm.engine.info.weight_bytes < plain
        assert len(llm.generate("Hello", GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 24


def test_quantizing_what_is_quantized_is_refused(tiny_llama: Path, demo_path: Path) -> None:
    with pytest.raises(UserError, match=r"'int8', but .* holds quantized weights already.*octavo convert"):
        LLM(str(demo_path), quantization="int8")
    with pytest.raises(UserError, match="quantization is 'nf4'; it must be one of int8, fp8, w4a16"):
        LLM(str(tiny_llama), quantization="nf4")


def test_a_missing_tokenizer_is_found_before_the_weights_are_read(tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((tiny_llama / "config.json").read_text())
    with pytest.raises(CheckpointError, match=r"holds no tokenizer.*--tokenizer"):
        LLM(str(tmp_path))
    with pytest.raises(CheckpointError, match=r"holds no \.safetensors file; download the checkpoint again"):
        LLM(str(tmp_path), tokenizer=str(tiny_llama))


def test_token_ids_only(tiny_llama: Path) -> None:
    with LLM(str(tiny_llama), skip_tokenizer_init=True) as llm:
        assert llm.generate([[5, 6]], use_tqdm=False)[0].outputs[0].text == ""
        with pytest.raises(UserError, match="skip_tokenizer_init"):
            llm.generate("text", use_tqdm=False)


def test_dummy_weights_need_only_a_config(tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((tiny_llama / "config.json").read_text())
    with LLM(str(tmp_path), load_format="dummy", skip_tokenizer_init=True) as llm:
        assert len(llm.generate([[5, 6]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 24


def test_prompts_beyond_the_first_steps_are_added_while_it_runs(tiny_llama: Path, monkeypatch) -> None:
    with LLM(str(tiny_llama), dtype="float32", max_num_batched_tokens=16, max_num_seqs=4) as llm:
        engine, added, at_step = llm.engine, [], []
        add, step = engine.add, engine.step
        monkeypatch.setattr(engine, "add", lambda item: (added.append(item.request_id), add(item)))
        monkeypatch.setattr(engine, "step", lambda: (at_step.append(len(added)), step())[1])
        prompts = [[5 + i] * 8 for i in range(9)]
        alone = [tokens(llm.generate([prompt], GREEDY, use_tqdm=False))[0] for prompt in prompts]
        added.clear(), at_step.clear()
        assert tokens(llm.generate(prompts, GREEDY, use_tqdm=False)) == alone
        assert at_step[:2] == [4, 9]  # two steps' worth of 16 tokens, then all

        wrong = [*prompts, [engine.info.vocab_size]]
        with pytest.raises(UserError, match=rf"token id {engine.info.vocab_size}"):
            llm.generate(wrong, GREEDY, use_tqdm=False)
        assert not engine.has_work
        assert tokens(llm.generate(prompts, GREEDY, use_tqdm=False)) == alone
