"""MODEL_OR_CONFIG to a config dictionary, without reading a weight: preset, config.json, directory, or Hub id."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from octavo.errors import ModelNotFoundError, UserError
from octavo.plan.presets import PRESETS, find_preset


def load_config(name: str) -> dict[str, Any]:
    """The configuration of a preset, a config.json, a model directory, or a Hub repository (cached copy first).

    ModelNotFoundError says what was tried; a `.gguf` file is the caller's to read, since its reader needs torch.
    """
    preset = find_preset(name)
    if preset is not None:
        return preset
    path = Path(name).expanduser()
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise ModelNotFoundError(f"the directory {name!r} has no config.json", param="model")
    if path.is_file():
        return _read(path)
    return _from_hub(name)


def _read(path: Path) -> dict[str, Any]:
    try:
        return _parse(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read ({error})", param="model") from error


def _parse(text: str, origin: str) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{origin} is not a JSON configuration ({error})", param="model") from error
    if not isinstance(config, dict):
        raise UserError(f"{origin} must hold a JSON object, not a {type(config).__name__}", param="model")
    return config


def _from_hub(name: str) -> dict[str, Any]:
    """The repository's config.json: the Hub client's cached copy, else one request."""
    tried = f"a preset ({', '.join(PRESETS)}), a file and a directory"
    if name.count("/") != 1:
        raise ModelNotFoundError(
            f"{name!r} is none of these: {tried}. A Hugging Face id has the form owner/name.", param="model"
        )
    import huggingface_hub as hub

    cached = hub.try_to_load_from_cache(name, "config.json")
    if isinstance(cached, str):
        return _read(Path(cached))
    url = hub.hf_hub_url(name, "config.json")
    try:
        answer = hub.get_session().get(url, headers=hub.utils.build_hf_headers(), follow_redirects=True, timeout=10)
        answer.raise_for_status()
    except (
        Exception
    ) as error:  # the client's kinds of error differ between versions; each means that there is no config
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelNotFoundError(
            f"{name!r} is none of these: {tried}; and {url} cannot be read ({reason})", param="model"
        ) from error
    return _parse(answer.text, url)
