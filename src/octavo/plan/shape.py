"""What a Hugging Face config.json says about sizes: parameters by part, and the KV cache of each layer.

The counts equal those of transformers' own modules for the families named in `FAMILIES` (a test builds them on the meta
device and compares). For another family the KV cache is still read, and the parameters are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.errors import UnsupportedModelError, UserError

Config = Mapping[str, Any]


@dataclass(frozen=True)
class Family:
    """How a family departs from Llama's block (q, k, v, o, gate, up, down and two norms)."""

    norms_per_layer: int = 2
    qkv_bias: bool = False
    qk_norm: str = "none"  # none | head: one weight a head channel | full: one a projection channel
    is_tied: bool = False  # the default of tie_word_embeddings when the file leaves it out
    has_experts: bool = False


FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "mistral": Family(),
    "granite": Family(),
    "phi3": Family(),
    "smollm3": Family(),
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(qk_norm="head"),
    "olmo2": Family(qk_norm="full"),
    "gemma": Family(is_tied=True),
    "gemma2": Family(norms_per_layer=4, is_tied=True),
    "gemma3_text": Family(norms_per_layer=4, qk_norm="head", is_tied=True),
    "mixtral": Family(has_experts=True),
    "qwen3_moe": Family(qk_norm="head", has_experts=True),
    "llama4_text": Family(has_experts=True),
}


@dataclass(frozen=True)
class KVLayer:
    """The KV cache of one layer: elements a token, and how many tokens back it reaches (None: all)."""

    elements: int
    window: int | None = None


@dataclass(frozen=True)
class Parameters:
    """Parameters by part. `linear` is what quantization covers: the projections of attention and feed-forward."""

    embedding: int
    lm_head: int  # 0 when tied to the embedding
    attention: int
    feed_forward: int  # experts too
    router: int
    norm: int
    bias: int
    vision: int
    active: int  # that one token passes through; equals total without experts

    @property
    def linear(self) -> int:
        return self.attention + self.feed_forward

    @property
    def total(self) -> int:
        return (
            self.embedding + self.lm_head + self.attention + self.feed_forward
            + self.router + self.norm + self.bias + self.vision
        )  # fmt: skip


@dataclass(frozen=True)
class Geometry:
    """The numbers that both calculations start from."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int


def text_config(config: Config) -> Config:
    """The language model's part of a config that also describes other towers."""
    nested = config.get("text_config")
    if not isinstance(nested, Mapping):
        return config
    outer = {k: config[k] for k in ("tie_word_embeddings", "torch_dtype", "dtype") if k in config}
    return {**outer, **nested}


def geometry(config: Config) -> Geometry:
    """Layers and heads. UserError names the field that is missing or no positive whole number."""
    text = text_config(config)
    layers = _positive(text, "num_hidden_layers", "n_layer", "num_layers")
    heads = _positive(text, "num_attention_heads", "n_head")
    hidden = _positive(text, "hidden_size", "n_embd", "d_model")
    kv_heads = text.get("num_key_value_heads") or heads
    head_dim = text.get("head_dim") or hidden // heads
    return Geometry(layers, hidden, heads, int(kv_heads), int(head_dim))


def _positive(text: Config, *names: str) -> int:
    for name in names:
        value = text.get(name)
        if value is not None:
            if not isinstance(value, int) or value < 1:
                raise UserError(
                    f"config.json: {name} is {value!r}; it must be a whole number of at least 1", param=name
                )
            return value
    raise UserError(f"config.json has no {names[0]}; it does not describe a decoder language model", param=names[0])


def kv_layers(config: Config) -> list[KVLayer]:
    """One entry a layer. Latent attention (DeepSeek) stores one compressed vector instead of K and V."""
    text = text_config(config)
    g = geometry(config)
    if text.get("kv_lora_rank"):
        return [KVLayer(int(text["kv_lora_rank"]) + int(text["qk_rope_head_dim"]))] * g.layers
    elements = 2 * g.kv_heads * g.head_dim
    return [
        KVLayer(0 if kind == "linear_attention" else elements, window)
        for kind, window in zip(_layer_kinds(text, g.layers), _windows(text, g.layers), strict=True)
    ]


def _layer_kinds(text: Config, layers: int) -> list[str]:
    """`layer_types` where the file has it, else the pattern that the family's code derives."""
    kinds = text.get("layer_types")
    if kinds is not None:
        if len(kinds) != layers:
            raise UserError(
                f"config.json: layer_types has {len(kinds)} entries for {layers} layers", param="layer_types"
            )
        return [str(kind) for kind in kinds]
    family = text.get("model_type", "")
    if family == "gemma2":
        return ["sliding_attention" if i % 2 == 0 else "full_attention" for i in range(layers)]
    if family == "gemma3_text":
        pattern = int(text.get("sliding_window_pattern") or 6)
        return ["full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(layers)]
    if family == "llama4_text":
        step = int(text.get("no_rope_layer_interval") or 4)
        return ["full_attention" if (i + 1) % step == 0 else "chunked_attention" for i in range(layers)]
    if text.get("sliding_window") and "use_sliding_window" in text:  # the Qwen families: the last layers slide
        first = int(text.get("max_window_layers", layers)) if text["use_sliding_window"] else layers
        return ["full_attention" if i < first else "sliding_attention" for i in range(layers)]
    return ["sliding_attention" if text.get("sliding_window") else "full_attention"] * layers


def _windows(text: Config, layers: int) -> list[int | None]:
    size = {"sliding_attention": text.get("sliding_window"), "chunked_attention": text.get("attention_chunk_size")}
    return [int(size[kind]) if size.get(kind) else None for kind in _layer_kinds(text, layers)]  # type: ignore[arg-type]


def parameters(config: Config) -> Parameters:
    """Parameters by part; UnsupportedModelError for a family whose blocks this module does not know."""
    text = text_config(config)
    name = str(text.get("model_type", ""))
    family = FAMILIES.get(name)
    if family is None:
        raise UnsupportedModelError(
            f"the parameters of model_type {name!r} cannot be counted from its config; "
            f"known are {', '.join(FAMILIES)}. "
            "Give the number itself, for example --params 7B",
            param="model",
        )
    g = geometry(config)
    q, kv = g.heads * g.head_dim, g.kv_heads * g.head_dim
    vocab = _positive(text, "vocab_size")
    feed, router, active_feed = _feed_forward(text, family, g)
    attention = g.layers * (2 * g.hidden * q + 2 * g.hidden * kv)
    norms = g.layers * (family.norms_per_layer * g.hidden + _qk_norm(family, g)) + g.hidden
    bias = g.layers * _bias(text, family, g)
    embedding = vocab * g.hidden
    head = 0 if text.get("tie_word_embeddings", family.is_tied) else embedding
    vision = _llama4_vision(config, g.hidden) if name == "llama4_text" and "vision_config" in config else 0
    fixed = embedding + head + attention + router + norms + bias
    return Parameters(embedding, head, attention, feed, router, norms, bias, vision, fixed + active_feed)


def _qk_norm(family: Family, g: Geometry) -> int:
    return {"none": 0, "head": 2 * g.head_dim, "full": (g.heads + g.kv_heads) * g.head_dim}[family.qk_norm]


def _bias(text: Config, family: Family, g: Geometry) -> int:
    qkv = (g.heads + 2 * g.kv_heads) * g.head_dim
    if family.qkv_bias:
        return qkv
    count = qkv + g.hidden if text.get("attention_bias") else 0
    if text.get("mlp_bias"):
        count += 2 * int(text["intermediate_size"]) + g.hidden
    return count


def _feed_forward(text: Config, family: Family, g: Geometry) -> tuple[int, int, int]:
    """(weights of all layers, routers, weights that one token uses)."""
    dense = 3 * g.hidden * _positive(text, "intermediate_size")
    if not family.has_experts:
        return g.layers * dense, 0, g.layers * dense
    experts = _positive(text, "num_local_experts", "num_experts")  # older and newer files differ
    used = int(text.get("num_experts_per_tok") or 1)
    is_sparse = _sparse_layers(text, g.layers)
    expert = 3 * g.hidden * int(text.get("moe_intermediate_size") or text["intermediate_size"])
    shared = 0
    if "interleave_moe_layer_step" in text:  # Llama 4: one expert that every token passes, wider dense layers
        shared, dense = expert, 3 * g.hidden * int(text["intermediate_size_mlp"])
    sparse, plain = sum(is_sparse), g.layers - sum(is_sparse)
    total = sparse * (experts * expert + shared) + plain * dense
    return total, sparse * g.hidden * experts, sparse * (used * expert + shared) + plain * dense


def _sparse_layers(text: Config, layers: int) -> list[bool]:
    if "interleave_moe_layer_step" in text:
        step = int(text["interleave_moe_layer_step"])
        chosen = text.get("moe_layers") or range(step - 1, layers, step)
        return [i in set(chosen) for i in range(layers)]
    step = int(text.get("decoder_sparse_step") or 1)
    dense = set(text.get("mlp_only_layers") or ())
    return [i not in dense and (i + 1) % step == 0 for i in range(layers)]


def _llama4_vision(config: Config, hidden: int) -> int:
    """Llama 4's image tower with its adapter and projector (two biased norms, biased projections)."""
    v = config["vision_config"]
    width, inner, depth = int(v["hidden_size"]), int(v["intermediate_size"]), int(v["num_hidden_layers"])
    block = 4 * (width * width + width) + 2 * width * inner + inner + width + 4 * width
    patches = (int(v["image_size"]) // int(v["patch_size"])) ** 2 + 1
    patch = int(v.get("num_channels", 3)) * int(v["patch_size"]) ** 2 * width
    middle, out = int(v["projector_input_dim"]), int(v["projector_output_dim"])
    adapter = inner * middle + out * out
    embeddings = patch + width + patches * width + 4 * width
    return depth * block + embeddings + adapter + int(v["vision_output_dim"]) * hidden
