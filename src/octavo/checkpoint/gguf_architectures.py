"""What each GGUF architecture is called by Hugging Face: its class, its tensors, and how llama.cpp changed them."""

from __future__ import annotations

from dataclasses import dataclass, field

TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
LLAMA = {**ATTENTION, **MLP, "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
AROUND_BOTH = {
    **ATTENTION,
    **MLP,
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
AFTER_BOTH = {key: name for key, name in AROUND_BOTH.items() if key not in ("attn_norm", "ffn_norm")}
PHI3 = {**LLAMA, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
QWEN_EXPERTS = {
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
MIXTRAL_EXPERTS = {
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}


@dataclass(frozen=True)
class Architecture:
    """`blocks` names a layer's tensors, `experts` those that hold all experts in their first dimension.

    permuted: rows of q and k have the two halves of each head interleaved.
    one_added: norms are stored as the factor itself, while Hugging Face's are the factor less one.
    """

    model_class: str
    model_type: str
    blocks: dict[str, str] = field(default_factory=lambda: LLAMA)
    experts: dict[str, str] = field(default_factory=dict)
    permuted: bool = False
    one_added: bool = False
    activation: str = "silu"

    def name(self, stored: str) -> str | None:
        """ "blk.3.attn_q.weight" -> "model.layers.3.self_attn.q_proj.weight"; None for one that has no such name.

        The name of a tensor of experts has "{}" in the place of their number.
        """
        stem, _, kind = stored.rpartition(".")
        if stem in TOP_NAMES:
            return f"{TOP_NAMES[stem]}.{kind}"
        parts = stem.split(".")
        names = {**self.blocks, **self.experts}
        if len(parts) == 3 and parts[0] == "blk" and parts[2] in names:
            return f"model.layers.{parts[1]}.{names[parts[2]]}.{kind}"
        return None


MIXTRAL = Architecture(
    "MixtralForCausalLM",
    "mixtral",
    {**LLAMA, "ffn_gate_inp": "block_sparse_moe.gate"},
    MIXTRAL_EXPERTS,
    permuted=True,
)
GELU = "gelu_pytorch_tanh"
ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", "llama", permuted=True),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2"),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", "qwen3_moe", {**LLAMA, "ffn_gate_inp": "mlp.gate"}, QWEN_EXPERTS),
    "gemma": Architecture("GemmaForCausalLM", "gemma", one_added=True, activation=GELU),
    "gemma2": Architecture("Gemma2ForCausalLM", "gemma2", AROUND_BOTH, one_added=True, activation=GELU),
    "gemma3": Architecture("Gemma3ForCausalLM", "gemma3_text", AROUND_BOTH, one_added=True, activation=GELU),
    "phi3": Architecture("Phi3ForCausalLM", "phi3", PHI3),
    "granite": Architecture("GraniteForCausalLM", "granite", permuted=True),
    "olmo2": Architecture("Olmo2ForCausalLM", "olmo2", AFTER_BOTH),
}
EXPERTS = ("qwen3moe",)  # besides llama, whose files with experts are Mixtral's
