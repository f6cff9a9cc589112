"""Drives the machine with seeded random events: `python tests/core/scheduler_soak.py --steps 3000000`."""

from __future__ import annotations

import argparse
import random
import time

from scheduler_machine import NUM_TOKENS, SchedulerMachine, Shape, sampling

WINDOWS: tuple[tuple[int | None, ...], ...] = (
    (None,),
    (5,),
    (None, 6),
    (None, 3, 9),
    (1,),
    (None, None),
)


def random_shape(rng: random.Random) -> Shape:
    """Small and tight, so that blocks run out and prefixes meet."""
    windows = rng.choice(WINDOWS)
    block_size = rng.choice((1, 2, 4, 4))
    max_model_len = rng.randint(8, 40)
    max_num_seqs = rng.randint(1, 6)
    alone = len(windows) * (-(-max_model_len // block_size) + 1)
    return Shape(
        windows=windows,
        num_blocks=1 + int(alone * rng.choice((0.7, 1.0, 1.0, 1.5, 2.5))),
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + rng.randint(0, 24),
        max_model_len=max_model_len,
        prefill_cap=rng.choice((0, 0, 1, 5)),
        policy=rng.choice(("fcfs", "fcfs", "priority")),
        caching=rng.random() < 0.9,
        depth=rng.choice((1, 1, 2, 2, 2, 3)),
    )


def random_request(rng: random.Random, machine: SchedulerMachine) -> None:
    """A prompt that likely begins like another one."""
    length = rng.randint(1, machine.shape.max_model_len)
    shared = length - rng.choice((rng.randint(0, length), rng.randint(0, min(3, length))))
    if machine.truths and rng.random() < 0.5:
        prompt = rng.choice(list(machine.truths.values())[-2:]).tokens[:shared]
    else:
        base = random.Random(rng.randint(0, 3))
        prompt = [base.randrange(NUM_TOKENS) for _ in range(shared)]
    prompt += [rng.randrange(NUM_TOKENS) for _ in range(length - len(prompt))]
    max_tokens = rng.choice((None, rng.randint(1, 4), rng.randint(1, 40)))
    params = sampling(
        max_tokens,
        ignore_eos=rng.random() < 0.7,
        min_tokens=0 if max_tokens is None else rng.randint(0, min(3, max_tokens)),
        stop_token_ids=[1] if rng.random() < 0.1 else None,
        prompt_logprobs=1 if rng.random() < 0.08 else None,
    )
    machine.add(prompt, params, rng.randint(-1, 1), rng.choice((None, None, None, "a", "bb")))


def failure_among_twins(rng: random.Random, machine: SchedulerMachine) -> None:
    """Rare by chance: a request is admitted on the blocks of a step in flight, and then that step fails."""
    while machine.steps:
        machine.update([rng.randrange(NUM_TOKENS) for _ in range(4)])
    prompt = [rng.randrange(NUM_TOKENS) for _ in range(rng.randint(2, machine.shape.max_model_len))]
    for _ in range(2):
        machine.add(prompt, sampling(3))
        machine.schedule()
    machine.fail(0)


def random_event(rng: random.Random, machine: SchedulerMachine) -> None:
    """One event; about half of all are schedule and update."""
    x = rng.random()
    if x < 0.4:
        machine.schedule()
    elif x < 0.74:
        machine.update([rng.randrange(NUM_TOKENS) for _ in range(4)], rng.randint(0, 3))
    elif x < 0.75:
        failure_among_twins(rng, machine)
    elif x < 0.92:
        if len(machine.truths) < 12:
            random_request(rng, machine)
    elif x < 0.94:
        machine.abort(rng.randrange(100))
    elif x < 0.95:
        machine.stop(rng.randrange(100))
    elif x < 0.98:
        machine.fail(rng.choice((0, 0, rng.randrange(100))))
    elif x < 0.998:
        machine.propose(rng.randrange(100), [rng.randrange(NUM_TOKENS) for _ in range(rng.randint(1, 5))])
    else:
        machine.clear_cache()


class SoakFailure(AssertionError):
    """An invariant broke; the message has the seed, the number of steps until then, and the cause."""

    def __init__(self, seed: int, steps: int, cause: BaseException) -> None:
        super().__init__(f"seed {seed} failed after {steps} steps: {type(cause).__name__}: {cause}")
        self.steps = steps


def soak(num_steps: int, seed: int = 0, events_per_machine: int = 250, totals: dict[str, int] | None = None) -> int:
    """Run at least `num_steps` random steps over ever new shapes; returns how many. SoakFailure if anything breaks."""
    done = 0
    while done < num_steps:
        rng = random.Random(seed)
        machine = SchedulerMachine(random_shape(rng))
        try:
            for _ in range(events_per_machine):
                random_event(rng, machine)
                done += 1
                machine.check()
            done += machine.drain([rng.randrange(1, NUM_TOKENS) for _ in range(3)])
        except (AssertionError, LookupError) as cause:
            raise SoakFailure(seed, done, cause) from cause
        if totals is not None:
            stats = machine.scheduler.stats()
            for name in ("preemptions", "prefix_queries", "prefix_hits", "steps"):
                totals[name] = totals.get(name, 0) + getattr(stats, name)
            totals["requests"] = totals.get("requests", 0) + machine.num_added
        seed += 1
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    start, done, totals = time.perf_counter(), 0, {"machines": 0}
    seed = options.seed
    while done < options.steps:
        done += soak(1, seed, totals=totals)
        seed += 1
        totals["machines"] += 1
        if totals["machines"] % 1000 == 0:
            print(f"{done} steps, {time.perf_counter() - start:.0f} s, {totals}", flush=True)
    print(f"{done} random steps without a failure in {time.perf_counter() - start:.0f} s: {totals}")


if __name__ == "__main__":
    main()
