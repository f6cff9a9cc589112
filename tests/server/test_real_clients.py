"""Other projects' clients against a real server: lm-eval, GuideLLM and vllm-router, each in an environment of its own.

OCTAVO_TEST_PEERS may name a folder that already holds the environments (lmeval, guidellm, router); otherwise they are
made for the session.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from servers import RunningServer, free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

PACKAGES = {
    "lmeval": ["lm-eval[api]==0.4.13"],
    "guidellm": ["torch", "guidellm==0.8.1"],
    "router": ["vllm-router==0.1.17"],
}
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


@pytest.fixture(scope="session")
def peer(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The `bin` folder of an environment with the peer of that name; skips when it cannot be installed."""
    ready = os.environ.get("OCTAVO_TEST_PEERS")
    folder = Path(ready) if ready else tmp_path_factory.mktemp("peers")

    @functools.cache  # GuideLLM is used by two tests and takes minutes to install
    def reason_not_installed(name: str) -> str:
        subprocess.run([sys.executable, "-m", "venv", str(folder / name)], check=True)
        command = [str(folder / name / "bin/pip"), "install", "-q", *PACKAGES[name]]
        installed = subprocess.run(command, capture_output=True, text=True)
        return installed.stderr[-300:] if installed.returncode else ""

    def bin_folder(name: str) -> Path:
        if not ready and (reason := reason_not_installed(name)):
            pytest.skip(f"{name} cannot be installed here: {reason}")
        return folder / name / "bin"

    return bin_folder


def run(command: list[str], **environment: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, timeout=900)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def test_lm_eval_scores_through_the_server(server: RunningServer, peer: Callable[[str], Path], tmp_path: Path) -> None:
    documents = [{"query": f"Item {i}:", "choices": ["yes", "never"], "gold": i % 2} for i in range(6)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, documents)))
    task: dict[str, Any] = {
        "task": "octavo_choice",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"validation": str(tmp_path / "data.jsonl")}},
        "output_type": "multiple_choice",
        "validation_split": "validation",
        "doc_to_text": "{{query}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "gold",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    (tmp_path / "task.yaml").write_text(json.dumps(task))  # JSON is YAML
    model = f"base_url={server.url}/v1/completions,model=tiny,max_length=512,tokenizer_backend=remote"
    arguments = ["--model", "local-completions", "--model_args", model, "--tasks", "octavo_choice"]
    arguments += ["--include_path", str(tmp_path), "--output_path", str(tmp_path / "out"), "--log_samples"]
    run([str(peer("lmeval") / "lm_eval"), *arguments], **OFFLINE)
    samples = [json.loads(line) for line in next((tmp_path / "out").rglob("samples_*.jsonl")).read_text().splitlines()]
    assert len(samples) == 6
    for sample in samples:
        for choice, (logprob, _) in zip(sample["doc"]["choices"], sample["filtered_resps"], strict=True):
            assert float(logprob) == pytest.approx(
                continuation_logprob(server, sample["doc"]["query"], f" {choice}"), abs=1e-3
            )


def continuation_logprob(server: RunningServer, context: str, continuation: str) -> float:
    """The same by vLLM's prompt_logprobs, which lm-eval does not use."""
    start = len(server.post("/tokenize", {"prompt": context}).json()["tokens"])
    ids = server.post("/tokenize", {"prompt": context + continuation}).json()["tokens"]
    answer = server.post("/v1/completions", {"prompt": ids, "max_tokens": 1, "prompt_logprobs": 0}).json()
    positions = answer["choices"][0]["prompt_logprobs"]
    return sum(float(positions[i][str(ids[i])]["logprob"]) for i in range(start, len(ids)))


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
def test_guidellm_measures_the_server(
    server: RunningServer, peer: Callable[[str], Path], tiny_llama: Path, tmp_path: Path, route: str
) -> None:
    report = tmp_path / "report.json"
    arguments = ["--backend", f"kind=openai_http,target={server.url},request_format={route}"]
    arguments += ["--profile", "kind=concurrent,streams=3", "--constraint", "kind=max_requests,count=6"]
    arguments += ["--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8"]
    arguments += ["--tokenizer", f"kind=huggingface_auto,model={tiny_llama}", "--output", f"kind=json,path={report}"]
    run([str(peer("guidellm") / "guidellm"), "run", *arguments, "--disable-console-interactive"], **OFFLINE)
    metrics = json.loads(report.read_text())["benchmarks"][0]["metrics"]
    assert metrics["request_totals"]["successful"] == 6
    assert metrics["request_totals"]["errored"] == 0
    assert metrics["output_token_count"]["successful"]["mean"] == 8


def test_vllm_router_forwards_to_the_server(server: RunningServer, peer: Callable[[str], Path], tmp_path: Path) -> None:
    port, metrics_port = free_port(), free_port()
    command = [str(peer("router") / "vllm-router"), "--worker-urls", server.url, "--host", "127.0.0.1"]
    command += ["--port", str(port), "--prometheus-port", str(metrics_port), "--policy", "cache_aware"]
    with (tmp_path / "log").open("wb") as log:
        router = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        body = {"model": "tiny", "prompt": "Once upon", "max_tokens": 5}
        direct = server.post("/v1/completions", body).json()["choices"]
        deadline = time.monotonic() + 60
        while True:
            try:
                answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60)
                if answer.status_code == 200:
                    break
            except httpx.TransportError:
                pass
            assert time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(0.2)
        assert answer.json()["choices"] == direct
        assert "no_stop_trim" in answer.headers["x-octavo-ignored"]
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "stream": True}
        streamed = httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=chat, timeout=60)
        assert streamed.text.endswith("data: [DONE]\n\n")
    finally:
        router.terminate()
        router.wait(20)
