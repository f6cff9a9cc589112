"""Do a request's tokens depend on what runs beside it? Compares log-probabilities bit by bit across five ways to run.

    python benchmarks/gpu_deterministic.py MODEL [--deterministic] [--quantizations none,fp8,w4a16] [--only ways]

Each prompt is answered alone; then all in one batch, with their prompts in the prefix cache, with prompts computed in
small chunks, and with so few KV blocks that requests are preempted. Greedy; a request agrees when all its tokens and
their log-probabilities have the same bits as alone. With --deterministic the engine's mode of that name is on, a
disagreement is a failure, and the batch is timed with the mode and without (`--only time` is for a device that nothing
else uses, `--only ways` for any other). Without it the table shows how far the engine is deterministic as it is.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from dataclasses import dataclass, replace
from typing import Any

from octavo import LLM, SamplingParams
from octavo.engine.messages import EngineInfo
from octavo.engine.outputs import RequestOutput

Run = list[tuple[list[int], list[float]]]  # tokens and their log-probabilities, a request


@dataclass(frozen=True)
class Plan:
    """What is run: prompts as token ids, and how many tokens each request gets."""

    model: str
    prompts: list[list[int]]
    num_tokens: int
    kwargs: dict[str, Any]

    @property
    def length(self) -> int:
        return max(map(len, self.prompts)) + self.num_tokens

    def load(self, **more: Any) -> LLM:
        """An engine for no more requests than there are prompts: it captures fewer graphs, so it starts sooner."""
        settings = {"skip_tokenizer_init": True, "max_model_len": self.length, "max_num_seqs": len(self.prompts)}
        return LLM(self.model, **{**settings, **self.kwargs, **more})

    def generate(self, llm: LLM, prompts: list[list[int]]) -> tuple[Run, list[RequestOutput]]:
        params = SamplingParams(
            temperature=0.0, max_tokens=self.num_tokens, ignore_eos=True, logprobs=0, detokenize=False
        )
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return [_trace(output) for output in outputs], outputs


def _trace(output: RequestOutput) -> tuple[list[int], list[float]]:
    answer = output.outputs[0]
    assert answer.logprobs is not None
    return answer.token_ids, [e[t].logprob for t, e in zip(answer.token_ids, answer.logprobs, strict=True)]


def batch_seconds(plan: Plan) -> float:
    """Seconds that all together take: the second time, the first warms up."""
    with plan.load(enable_prefix_caching=False) as llm:
        plan.generate(llm, plan.prompts)
        begin = time.perf_counter()
        plan.generate(llm, plan.prompts)
        return time.perf_counter() - begin


def alone_and_batch(plan: Plan) -> tuple[Run, Run, EngineInfo]:
    """Each prompt by itself, all together, and what the engine says of itself."""
    with plan.load(enable_prefix_caching=False) as llm:
        alone = [plan.generate(llm, [prompt])[0][0] for prompt in plan.prompts]
        return alone, plan.generate(llm, plan.prompts)[0], llm.engine.info


def with_prefix_hits(plan: Plan) -> Run:
    with plan.load(enable_prefix_caching=True) as llm:
        plan.generate(llm, plan.prompts)
        run, outputs = plan.generate(llm, plan.prompts)
        if not all(output.num_cached_tokens for output in outputs):
            raise SystemExit("a request had no prefix hit; give longer prompts or a larger KV cache")
        return run


def in_chunks(plan: Plan, num_tokens: int) -> Run:
    """All together, with steps of at most `num_tokens` tokens."""
    with plan.load(
        enable_prefix_caching=False, max_num_batched_tokens=num_tokens, max_num_seqs=min(num_tokens, len(plan.prompts))
    ) as llm:
        return plan.generate(llm, plan.prompts)[0]


def with_preemptions(plan: Plan, info: EngineInfo) -> tuple[Run, int]:
    """All together in a KV cache for two fifths of their tokens; also how many preemptions there were."""
    block_bytes, block_size = info.block_bytes, info.block_size
    blocks = sum(-(-(len(prompt) + plan.num_tokens) // block_size) for prompt in plan.prompts)
    blocks = max(2 * blocks // 5, -(-plan.length // block_size)) + 1
    with plan.load(enable_prefix_caching=False, kv_cache_memory_bytes=blocks * block_bytes) as llm:
        run, _ = plan.generate(llm, plan.prompts)
        preemptions = llm.engine.stats().preemptions
    if not preemptions:
        raise SystemExit("no request was preempted; give more prompts")
    return run, preemptions


def agreement(alone: Run, other: Run) -> tuple[int, int, int | None, float]:
    """Requests with the same bits, with the same tokens, the earliest position that differs, the largest difference.

    The difference is of log-probabilities, over the tokens before a request's first other token.
    """
    same_bits = same_tokens = 0
    first: int | None = None
    largest = 0.0
    for (tokens, values), (other_tokens, other_values) in zip(alone, other, strict=True):
        same_tokens += tokens == other_tokens
        same_bits += tokens == other_tokens and values == other_values
        listed = list(zip(tokens, other_tokens, values, other_values, strict=True))
        place = next((i for i, (t, u, x, y) in enumerate(listed) if t != u or x != y), None)
        if place is not None:
            first = place if first is None else min(first, place)
        for t, u, x, y in listed:
            if t != u:
                break
            largest = max(largest, abs(x - y))
    return same_bits, same_tokens, first, largest


def random_prompts(count: int, shortest: int, longest: int, vocab: int) -> list[list[int]]:
    draw = random.Random("deterministic").randint
    return [[draw(100, vocab - 1) for _ in range(draw(shortest, longest))] for _ in range(count)]


def examine(plan: Plan, chunk: int) -> tuple[list[list[str]], bool]:
    """Rows of the table, and whether all requests agree in all ways."""
    alone, batch, info = alone_and_batch(plan)
    preempted, preemptions = with_preemptions(plan, info)
    ways = {
        "in a batch": batch,
        "prefix hit": with_prefix_hits(plan),
        f"chunks of {chunk}": in_chunks(plan, chunk),
        f"{preemptions} preemptions": preempted,
    }
    rows, agrees = [], True
    for name, run in ways.items():
        same_bits, same_tokens, first, largest = agreement(alone, run)
        count = len(plan.prompts)
        agrees = agrees and same_bits == count
        place = "-" if first is None else str(first)
        rows.append([name, f"{same_bits} of {count}", f"{same_tokens} of {count}", place, f"{largest:.2e}"])
    return rows, agrees


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--quantizations", default="none", help="in turn; 'none': as the checkpoint is")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--shortest", type=int, default=33)
    parser.add_argument("--longest", type=int, default=400)
    parser.add_argument("--chunk", type=int, default=96, help="tokens a step when prompts are chunked")
    parser.add_argument("--vocab", type=int, default=40_000)
    parser.add_argument("--only", default="ways,time")
    parser.add_argument("--kwargs", default="{}", help="JSON, more arguments of LLM()")
    args = parser.parse_args()
    prompts = random_prompts(args.prompts, args.shortest, args.longest, args.vocab)
    failed = False
    parts = args.only.split(",")
    print("| weights | way | same bits | same tokens | first other | largest difference |\n" + "|---" * 6 + "|")
    for name in args.quantizations.split(","):
        kwargs = {**json.loads(args.kwargs), "quantization": None if name == "none" else name}
        plain = Plan(args.model, prompts, args.tokens, kwargs)
        plan = replace(plain, kwargs={**kwargs, "deterministic": args.deterministic})
        if "ways" in parts:
            rows, agrees = examine(plan, args.chunk)
            failed = failed or (args.deterministic and not agrees)
            for row in rows:
                print("| " + " | ".join([name, *row]) + " |", flush=True)
        if "time" in parts and args.deterministic:
            seconds, other = batch_seconds(plan), batch_seconds(plain)
            failed = failed or seconds > 2 * other
            print(f"{name}: {seconds:.2f} s, without the mode {other:.2f} s: {seconds / other:.2f} times as long")
    if failed:
        raise SystemExit("requests disagree, or the mode is more than twice as slow")


if __name__ == "__main__":
    main()
