"""Which engine a model needs."""

from __future__ import annotations

import json

from octavo.checkpoint.source import resolve_model
from octavo.engine.config import EngineConfig
from octavo.engine.encoder_engine import EncoderEngine
from octavo.engine.engine import Engine
from octavo.models.encoder import is_encoder

AnyEngine = Engine | EncoderEngine


def build_engine(config: EngineConfig, *, is_serving: bool = False) -> AnyEngine:
    """Load the model: an encoder into an EncoderEngine, a causal model into an Engine. Raises what those raise."""
    path = resolve_model(config.model, need="config" if config.load_format == "dummy" else "weights")
    settings = path / "config.json"
    if path.is_dir() and settings.is_file() and is_encoder(json.loads(settings.read_text(encoding="utf-8"))):
        return EncoderEngine(config)
    return Engine(config, is_serving=is_serving)
