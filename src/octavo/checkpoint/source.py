"""From what a user calls a model to files on this machine."""

from __future__ import annotations

import re
from pathlib import Path

from octavo.checkpoint.demo import demo_path
from octavo.errors import CheckpointError, ModelNotFoundError

HUB_ID = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?")
# Only what a loader reads: pickled weights, ONNX exports and the like stay where they are.
HUB_PATTERNS = [
    "*.json",
    "*.safetensors",
    "*.jinja",
    "*.model",
    "tokenizer*",
    "merges.txt",
    "vocab.txt",
]
HUB_IGNORE = ["original/*", "onnx/*", "openvino/*", "consolidated*", "*.gguf"]
KINDS = "a directory, a .gguf file, a Hugging Face id such as HuggingFaceTB/SmolLM2-135M-Instruct, or demo"


def resolve_model(name: str) -> Path:
    """The directory or .gguf file that `name` stands for.

    `name` is a directory, a .gguf file, a Hub id (the local cache first, then the Hub) or "demo". Raises
    ModelNotFoundError, which says what was tried, or CheckpointError when a download broke off.
    """
    if not name:
        raise ModelNotFoundError(f"the model's name is empty; give {KINDS}")
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        return _checked_file(path)
    if name == "demo":
        return demo_path()
    if path.is_absolute() or name.startswith((".", "~")) or name.endswith(".gguf") or not HUB_ID.fullmatch(name):
        raise ModelNotFoundError(f"no model {name!r}: there is no such file or directory; give {KINDS}")
    return _from_hub(name)


def _checked_file(path: Path) -> Path:
    if path.suffix == ".gguf":
        return path
    if path.suffix in (".bin", ".pt", ".pth", ".ckpt", ".pkl"):
        raise CheckpointError(
            f"{path} is a pickle file, which can run any code when it is read, so it is never opened; "
            "convert it to safetensors first (model.save_pretrained of transformers writes that)"
        )
    if path.suffix == ".safetensors":
        raise ModelNotFoundError(f"{path} is a single weight file; give its directory {path.parent}, with config.json")
    raise ModelNotFoundError(f"{path} is not a model; give {KINDS}")


def _from_hub(name: str) -> Path:
    cached = _cached_snapshot(name)
    if cached is not None:
        return cached
    return _download(name)


def _is_complete(snapshot: Path) -> bool:
    """Whether a cached snapshot has a config and every shard that its index names (a broken download has not)."""
    import json

    if not (snapshot / "config.json").is_file():
        return False
    index = snapshot / "model.safetensors.index.json"
    if index.is_file():
        shards = set(json.loads(index.read_text(encoding="utf-8")).get("weight_map", {}).values())
        return all((snapshot / shard).is_file() for shard in shards)
    return any(snapshot.glob("*.safetensors"))


def _cached_snapshot(name: str) -> Path | None:
    """The newest cached snapshot, if it is whole; the Hub is not asked."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        config = try_to_load_from_cache(name, "config.json")
    except HFValidationError as error:
        raise ModelNotFoundError(f"no model {name!r}: not a path and not a Hub id ({error}); give {KINDS}") from error
    if not isinstance(config, str):
        return None
    snapshot = Path(config).parent
    return snapshot if _is_complete(snapshot) else None


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    tried = f"there is no directory {name!r} and it is not in the local Hugging Face cache"
    try:
        snapshot = Path(snapshot_download(name, allow_patterns=HUB_PATTERNS, ignore_patterns=HUB_IGNORE))
    except GatedRepoError as error:
        raise ModelNotFoundError(
            f"model {name!r} is gated: accept its terms on its Hub page and set HF_TOKEN to a token that may read it"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelNotFoundError(
            f"no model {name!r}: {tried}, and the Hub knows no such repository (or it is private: set HF_TOKEN). "
            f"Check the spelling, or give {KINDS}"
        ) from error
    except HfHubHTTPError as error:
        raise ModelNotFoundError(f"no model {name!r}: {tried}, and the Hub answered {_status(error)}") from error
    except LocalEntryNotFoundError as error:
        raise ModelNotFoundError(
            f"no model {name!r}: {tried}, and the Hub cannot be reached. Connect, set HF_ENDPOINT to a mirror, "
            f"or give {KINDS}"
        ) from error
    except Exception as error:  # what a broken transfer raises depends on the Hub client's HTTP library
        raise CheckpointError(f"the download of {name!r} broke off ({error}); run it again, it resumes") from error
    if not _is_complete(snapshot):
        raise CheckpointError(
            f"model {name!r} was downloaded to {snapshot}, but config.json or a .safetensors file is missing in it; "
            "a repository of pickled weights (.bin) alone is not read: convert it to safetensors first"
        )
    return snapshot


def _status(error: Exception) -> str:
    response = getattr(error, "response", None)
    code = getattr(response, "status_code", None)
    if code == 401:
        return "401: the token in HF_TOKEN is not valid; renew or unset it"
    return f"{code}: {error}" if code is not None else str(error)
