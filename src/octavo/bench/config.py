"""Settings of `octavo bench`."""

from __future__ import annotations

import dataclasses
import math
import shlex
from dataclasses import dataclass

from octavo.bench.slo import Slo
from octavo.errors import UserError
from octavo.settings import setting

PROFILES = ("synchronous", "concurrent", "throughput", "constant", "poisson", "sweep", "replay")
REQUEST_FORMATS = ("completions", "chat")
DEFAULT_MAX_SECONDS = 30.0
DEFAULT_DATA = "prompt_tokens=256,output_tokens=128"
SECRET_FIELDS = frozenset({"api_key"})


@dataclass
class BenchConfig:
    """What to load, how, for how long, and what to hold it against."""

    target: str = setting(help="Base URL of the OpenAI-compatible server, such as http://127.0.0.1:8000.")
    profile: str = setting(
        help="Traffic: one request at a time, a fixed number of streams, everything at once, a constant or a Poisson "
        "rate, a sweep over all of it, or a recorded trace.",
        choices=PROFILES,
    )
    rate: str | None = setting(
        None,
        "Comma list, one run each: requests a second (constant, poisson), streams (concurrent), speed-up of the "
        "recorded times (replay).",
        metavar="RATE,...",
    )
    max_requests: int | None = setting(None, "Requests to send in each run.")
    max_seconds: float | None = setting(
        None, f"Seconds in which each run starts requests; {DEFAULT_MAX_SECONDS:g} when --max-requests is not given."
    )
    data: str = setting(
        DEFAULT_DATA,
        "Synthetic prompts as key=value pairs (prompt_tokens, output_tokens, each also with _stdev, _min, _max; "
        "prefix_tokens, prefix_count, samples), or a .jsonl file with prompt or messages and output_tokens a line; "
        "for replay, a trace (.csv or .jsonl).",
    )
    slo: str | None = setting(
        None,
        "Objective, stated before the load: chat, rag, or limits such as ttft_ms=200,itl_ms=50,percentile=99.",
    )
    model: str | None = setting(None, "Model name to send; the first that the server lists by default.")
    processor: str | None = setting(
        None, "Tokenizer (folder or Hub id) for prompts of exact length; by default the server's own /tokenize."
    )
    output_dir: str = setting("octavo-bench", "Folder for benchmark.json, benchmark.csv and benchmark.html.")
    request_format: str = setting(
        "completions",
        "Route to load: completions (token ids, exact prompt lengths) or chat (text in the chat template).",
        choices=REQUEST_FORMATS,
    )
    warmup: float = setting(
        0.0, "Start of each run left out of the figures: below 1 a share of it, from 1 on requests (or seconds)."
    )
    cooldown: float = setting(0.0, "End of each run left out of the figures, counted as --warmup is.")
    seed: int = setting(0, "Seed of arrival times and lengths.")
    prompt_salt: str | None = setting(
        None, "Seed of the prompts' words; drawn anew by default, so that no prefix cache remembers an earlier load."
    )
    api_key: str | None = setting(None, "Bearer token for the server.")
    timeout: float = setting(600.0, "Seconds after which one request counts as failed.")
    drain_seconds: float = setting(60.0, "Seconds to wait for requests in flight when a run's time is over.")
    max_concurrency: int | None = setting(
        None, "Most requests in flight; throughput takes 256 by default, rates take no limit."
    )
    sweep_size: int = setting(10, "Runs of a sweep: one synchronous, one throughput, constant rates between.")
    ignore_eos: bool = setting(True, "Ask for exactly the requested output tokens (a field beyond OpenAI's API).")
    temperature: float = setting(0.0, "Sampling temperature to send.")
    scrape_interval: float = setting(0.5, "Seconds between two looks at the server's /metrics; 0 takes none.")
    label: str | None = setting(None, "A name for this load in its report.")
    fail_on_slo: bool = setting(False, "Exit with 1 when the objective is missed, for use in CI.")
    save_requests: bool = setting(False, "Also write requests.jsonl, the times of every single request.")

    def check(self) -> None:
        """Refuse values that no run can have. Raises UserError."""
        _check_choice("--profile", self.profile, PROFILES)
        _check_choice("--request-format", self.request_format, REQUEST_FORMATS)
        if not self.target.startswith(("http://", "https://")):
            raise UserError(f"--target is {self.target!r}; it must start with http:// or https://", param="target")
        for name in ("max_requests", "max_concurrency"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{_flag(name)} is {value}; it must be at least 1", param=name)
        for name, least in (("max_seconds", 0.0), ("timeout", 0.0)):
            value = getattr(self, name)
            if value is not None and not least < value < math.inf:
                raise UserError(f"{_flag(name)} is {value}; it must be a number of seconds above 0", param=name)
        for name in ("warmup", "cooldown", "drain_seconds", "scrape_interval", "temperature"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise UserError(f"{_flag(name)} is {value}; it must be 0 or more", param=name)
        if self.sweep_size < 3:
            raise UserError(f"--sweep-size is {self.sweep_size}; a sweep needs at least 3 runs", param="sweep_size")

        self.rates()
        if self.slo:
            Slo.parse(self.slo)

    def rates(self) -> list[float]:
        """The comma list as numbers above 0; empty when none was given. Raises UserError where the profile minds."""
        given = [] if self.rate is None or not str(self.rate).strip() else str(self.rate).split(",")
        rates = [_rate(part) for part in given]
        if self.profile in ("constant", "poisson", "concurrent") and not rates:
            what = "streams" if self.profile == "concurrent" else "requests a second"
            raise UserError(f"--profile {self.profile} needs --rate: {what}, such as 1,2,4", param="rate")
        if self.profile in ("synchronous", "throughput", "sweep") and rates:
            raise UserError(f"--profile {self.profile} finds its own rate; leave --rate out", param="rate")
        broken = [rate for rate in rates if rate != int(rate)]
        if self.profile == "concurrent" and broken:
            raise UserError(f"--rate has {broken[0]:g}; concurrent takes whole numbers of streams", param="rate")
        if self.profile == "replay" and len(rates) > 1:
            raise UserError(f"--rate is {self.rate!r}; replay takes one speed-up, such as 2", param="rate")
        return rates

    def time_limit(self) -> float | None:
        """Seconds in which a run may start requests; None: --max-requests, or the trace's end, ends it."""
        if self.max_seconds is None and self.max_requests is None and self.profile != "replay":
            return DEFAULT_MAX_SECONDS
        return self.max_seconds

    def base_url(self) -> str:
        """The target without a trailing slash or /v1, which routes add themselves."""
        return self.target.rstrip("/").removesuffix("/v1").rstrip("/")

    def command(self) -> str:
        """The command line that repeats this load, without secrets."""
        parts = ["octavo", "bench"]
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in SECRET_FIELDS or value == field.default:
                continue
            if isinstance(value, bool):
                parts.append(_flag(field.name) if value else _flag("no_" + field.name))
            else:
                parts += [_flag(field.name), str(value)]
        return shlex.join(parts)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise UserError(f"--rate has {text.strip()!r}; give numbers above 0, such as 1,2,4", param="rate")
    return value


def _check_choice(flag: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UserError(f"{flag} is {value!r}; choose one of {', '.join(choices)}", param=flag[2:].replace("-", "_"))
