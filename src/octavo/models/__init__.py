"""Models: families written out for speed, and the generic route through transformers."""

from octavo.models.base import CausalLM
from octavo.models.registry import load_model

__all__ = ["CausalLM", "load_model"]
