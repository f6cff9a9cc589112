"""What is held at once: one block and the activations, however many blocks there are."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_model, token_samples
from torch.profiler import ProfilerActivity, profile

from octavo.checkpoint.reader import open_checkpoint
from octavo.compress.assignment import make_plan
from octavo.compress.blocks import find_blocks
from octavo.compress.calibration import CalibrationSpec
from octavo.compress.checkpoint_source import CheckpointSource
from octavo.compress.estimate import estimate
from octavo.compress.job import CompressionJob
from octavo.compress.layer_work import refuse_non_finite
from octavo.compress.open_source import open_source
from octavo.compress.walker import BlockWalker, Keep
from octavo.errors import CheckpointError, UserError
from octavo.modifiers import GPTQModifier
from octavo.progress import Progress

GPTQ = {"scheme": "W4A16", "group_size": 32, "ignore": ["lm_head"]}


def held_bytes() -> int:
    """Memory of all tensors that are alive."""
    storages = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor) and thing.device.type == "cpu":
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def most_held(folder: Path, layers: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Beyond what was there before, after each block of a compression."""
    model = tiny_model("llama", num_hidden_layers=layers, hidden_size=128, intermediate_size=512, vocab_size=512)
    model.bfloat16().save_pretrained(folder / f"model{layers}")
    del model
    gc.collect()
    before = held_bytes()
    found = [0]

    def update(self: Progress, done: float, total: float | None = None, note: str | None = None) -> None:
        if note is not None:
            found.append(held_bytes() - before)

    with monkeypatch.context() as patch:
        patch.setattr(Progress, "update", update)
        source = open_source(str(folder / f"model{layers}"))
        spec = CalibrationSpec(token_samples(6, 24), num_calibration_samples=6)
        CompressionJob(source, [GPTQModifier(**GPTQ)], spec, 2).run(folder / f"out{layers}", False)
    assert all(parameter.is_meta for parameter in source.model.parameters())
    assert len(found) > layers
    return max(found)


def test_what_is_held_does_not_grow_with_the_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = (most_held(tmp_path, layers, monkeypatch) for layers in (2, 5))
    assert many < 1.05 * few


def test_inputs_wait_in_one_place_in_the_dtype_asked_for() -> None:
    model = tiny_model("llama")
    blocks = find_blocks(model)
    walkers = [BlockWalker(model, blocks, "cpu", Keep(torch.device("cpu"), dtype)) for dtype in (torch.bfloat16, None)]
    with torch.no_grad():
        for walker in walkers:
            walker.start(list(torch.tensor(token_samples(4, 24)).split(2)))
            places = [hidden.data_ptr() for hidden in walker.hidden]
            for index, batch in ((i, b) for i in range(2) for b in range(2)):
                walker.advance(index, batch)
            assert [hidden.data_ptr() for hidden in walker.hidden] == places
    short, exact = (torch.cat(walker.hidden) for walker in walkers)
    assert (short.dtype, exact.dtype) == (torch.bfloat16, torch.float32)
    assert 0 < float((short.float() - exact).norm() / exact.norm()) < 0.02


def test_inputs_wait_in_one_buffer_on_a_cpu() -> None:
    """Between buffers of their own, temporary ones left holes: a gigabyte in 64 batches of an 8B model."""
    model = tiny_model("llama")
    walker = BlockWalker(model, find_blocks(model))
    batches = [torch.tensor(token_samples(1, length)) for length in (24, 12, 24)]
    with torch.no_grad():
        walker.start(batches)
    assert len({hidden.untyped_storage().data_ptr() for hidden in walker.hidden}) == 1
    for batch, hidden in zip(batches, walker.hidden, strict=True):
        torch.testing.assert_close(hidden, model.model.embed_tokens(batch))


def most_allocated(action: Callable[[], object]) -> int:
    """The largest sum of buffers that one operation of torch takes."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        action()
    return max(event.cpu_memory_usage for event in profiled.events())


def test_looking_for_nan_takes_little_memory() -> None:
    """The sum of an 8B model's embedding took 4 GB in float64."""
    weight = torch.zeros(4096, 4096, dtype=torch.bfloat16)
    with torch.no_grad():
        assert most_allocated(lambda: refuse_non_finite("model", "weight", weight)) < weight.nbytes / 4
        weight[-1, -1] = torch.nan
        with pytest.raises(CheckpointError, match="1 values that are not finite"):
            refuse_non_finite("model", "weight", weight)


def test_batches_of_one_shape_share_masks_and_tables() -> None:
    model = tiny_model("gemma2")
    walker = BlockWalker(model, find_blocks(model))
    with torch.no_grad():
        walker.start(list(torch.tensor(token_samples(6, 24)).split(2)))
    masks = [kwargs["attention_mask"] for calls in walker.calls for _, kwargs in calls]
    distinct = {id(mask) for mask in masks if mask is not None}
    assert len(masks) == 6
    assert len(distinct) <= 2  # the sliding window's, and that of full attention


LLAMA_8B = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 4096,
    "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "dtype": "bfloat16",
}  # fmt: skip


def test_the_estimate_of_an_8b_model(tmp_path: Path) -> None:
    """64 samples of 2,048 tokens in less than 6 GB on a CPU, whatever the number of layers."""
    batches = [torch.zeros(1, 2048, dtype=torch.int64)] * 64
    totals = {}
    for layers in (2, 32):
        (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B | {"num_hidden_layers": layers}))
        source = CheckpointSource(open_checkpoint(tmp_path, load_format="dummy"), "8b")
        blocks = find_blocks(source.model)
        plan = make_plan(source.model, blocks, [GPTQModifier(scheme="W4A16", ignore=["lm_head"])])
        keep = Keep(torch.device("cpu"), torch.bfloat16, twice=False)
        needs = estimate(source, blocks, plan, batches, keep)
        assert needs.host["activations"] == 64 * 2048 * 4096 * 2
        assert not needs.device
        totals[layers] = sum(needs.host.values()) - needs.host["program"]
    assert totals[2] == totals[32] < 5e9
    assert needs.disk == pytest.approx(2 * 5.7e9, rel=0.02)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory is counted differently")
@pytest.mark.parametrize("batching", [["--batch-size", "1", "--no-align"], ["--batch-size", "1"], []])
def test_the_estimate_is_what_the_kernel_counts(batching: list[str], tmp_path: Path) -> None:
    """A block of an 8B shape at half its width, in several batches, with alignment, and in one pass."""
    width = {"hidden_size": 2048, "intermediate_size": 7168, "num_attention_heads": 16, "num_key_value_heads": 4}
    model = tiny_model("llama", num_hidden_layers=1, vocab_size=64128, max_position_embeddings=1024, **width)
    model.bfloat16().save_pretrained(tmp_path / "model")
    del model
    rows = token_samples(4, 256)
    (tmp_path / "tokens.jsonl").write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    command = [
        sys.executable, "-m", "octavo", "compress", str(tmp_path / "model"), "--output-dir", str(tmp_path / "out"),
        "--calibration-file", str(tmp_path / "tokens.jsonl"), *batching,
    ]  # fmt: skip
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    report = json.loads((tmp_path / "out" / "compression_report.json").read_text())
    assert report["peak_memory_bytes"] == pytest.approx(sum(report["estimate"]["host"].values()), rel=0.1)


def test_a_gpu_that_is_not_there_is_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(UserError, match="torch finds no usable GPU"):
        open_source("demo", device="cuda")
