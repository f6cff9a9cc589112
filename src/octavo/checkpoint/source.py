"""From what a user calls a model to files on this machine."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Literal

from octavo.checkpoint.demo import demo_path
from octavo.errors import CheckpointError, ModelNotFoundError

HUB_ID = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?")
TOKENIZER_PATTERNS = ["tokenizer*", "*.jinja", "*.model", "merges.txt", "vocab.*", "*token*.json", "config.json"]
# What is asked of the Hub: never pickled weights, other frameworks' files or a second copy of the weights; of the
# folders only those of sentence-transformers' stages, 1_Pooling say.
HUB_PATTERNS = {
    "weights": ["*.json", "*.safetensors", *TOKENIZER_PATTERNS],
    "config": ["*.json", *TOKENIZER_PATTERNS],
    "tokenizer": TOKENIZER_PATTERNS,
}
HUB_IGNORE = ["[!0-9]*/*", "consolidated*", "*.gguf"]
KINDS = "a directory, a .gguf file, a Hugging Face id such as HuggingFaceTB/SmolLM2-135M-Instruct, or demo"
Need = Literal["weights", "config", "tokenizer"]


def resolve_model(name: str, need: Need = "weights") -> Path:
    """The directory or .gguf file that `name` stands for.

    `name` is a directory, a .gguf file, a Hub id (the local cache first, then the Hub) or "demo". `need` says what must
    be there of a Hub's repository: its weights, or only the config or the tokenizer. Raises ModelNotFoundError, which
    says what was tried, or CheckpointError when a download broke off.
    """
    if not name:
        raise ModelNotFoundError(f"the model's name is empty; give {KINDS}")
    path = Path(name).expanduser()
    if name == "demo" and not (path / "config.json").is_file():  # any other folder of that name is no model
        return demo_path()
    if path.is_dir():
        return path
    if path.is_file():
        return _checked_file(path)
    if path.is_absolute() or name.startswith((".", "~")) or name.endswith(".gguf") or not HUB_ID.fullmatch(name):
        raise ModelNotFoundError(f"no model {name!r}: there is no such file or directory; give {KINDS}")
    return _cached_snapshot(name, need) or _download(name, need)


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


def _is_complete(snapshot: Path, need: Need) -> bool:
    """Whether a snapshot has what is needed, every shard that its index names included (a broken download has not)."""
    if need == "tokenizer":
        return any((snapshot / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json"))
    if not (snapshot / "config.json").is_file():
        return False
    index = snapshot / "model.safetensors.index.json"
    if need == "config":
        return True
    if index.is_file():
        shards = set(json.loads(index.read_text(encoding="utf-8")).get("weight_map", {}).values())
        return all((snapshot / shard).is_file() for shard in shards)
    return any(snapshot.glob("*.safetensors"))


def _cached_snapshot(name: str, need: Need) -> Path | None:
    """The newest cached snapshot, if it has what is needed; the Hub is not asked."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = [try_to_load_from_cache(name, file) for file in ("config.json", "tokenizer_config.json")]
    except HFValidationError as error:
        raise ModelNotFoundError(f"no model {name!r}: not a path and not a Hub id ({error}); give {KINDS}") from error
    for file in found:
        if isinstance(file, str) and _is_complete(Path(file).parent, need):
            return Path(file).parent
    return None


def _download(name: str, need: Need) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    tried = f"there is no directory {name!r} and it is not in the local Hugging Face cache"
    try:
        snapshot = Path(snapshot_download(name, allow_patterns=HUB_PATTERNS[need], ignore_patterns=HUB_IGNORE))
    except GatedRepoError as error:
        raise ModelNotFoundError(
            f"model {name!r} is gated: accept its terms on its Hub page and set HF_TOKEN to a token that may read it"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelNotFoundError(
            f"no model {name!r}: {tried}, and the Hub knows no such repository (or it is private, and HF_TOKEN is not "
            f"set or may not read it). Check the spelling, or give {KINDS}"
        ) from error
    except HfHubHTTPError as error:
        raise ModelNotFoundError(f"no model {name!r}: {tried}, and the Hub answered {_status(error)}") from error
    except LocalEntryNotFoundError as error:
        raise ModelNotFoundError(
            f"no model {name!r}: {tried}, and the Hub cannot be reached ({_reason(error)}). Connect, unset "
            f"HF_HUB_OFFLINE, set HF_ENDPOINT to a mirror, or give {KINDS}"
        ) from error
    except Exception as error:  # what a broken transfer raises depends on the Hub client's HTTP library
        raise CheckpointError(
            f"the download of {name!r} broke off ({_reason(error)}); run it again, it goes on where it stopped"
        ) from error
    if not _is_complete(snapshot, need):
        raise CheckpointError(
            f"model {name!r} was downloaded to {snapshot}, but its {need} are not all there. A repository of pickled "
            "weights (.bin) alone is not read, convert it to safetensors; of GGUF files give one as a file"
        )
    return snapshot


def _status(error: Exception) -> str:
    code = getattr(getattr(error, "response", None), "status_code", None)
    if code == 401:
        return "401: the token in HF_TOKEN is not valid; renew or unset it"
    return f"{code} ({_reason(error)}); try again later" if code is not None else _reason(error)


def _reason(error: Exception) -> str:
    """The first line of what an error says; the Hub client's texts run over several."""
    lines = str(error.__cause__ or error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
