"""Tiny models of every architecture that a shipped recipe names, from its real config class, with random weights.

What makes each one special is kept: Gemma2's caps on scores and logits and its sliding window, Phi3's fused layers and
long-rope, Qwen3's norms on heads, Llama 3's rope, tied embeddings, tokenizers without a pad token.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tiny_models import Pad, TokenizerKind, build_tiny_tokenizer

FUSED = ("down_proj", "gate_up_proj", "o_proj", "qkv_proj")
SPLIT = ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")
GEMMA = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system role') }}"
    "{% endif %}{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\n' + m['content'] + "
    "'<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
# 8 factors: one for each pair of the 16 numbers of a head.
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [1.0 + number for number in range(8)],
}


@dataclass(frozen=True)
class Architecture:
    """A model to build: its kind, what it has that others lack, its tokenizer, and the layers LoRA must find."""

    kind: str
    special: Mapping[str, Any] = field(default_factory=dict)
    tied: bool = False
    tokenizer: TokenizerKind = "bytelevel"
    pad: Pad = "own"
    chat_template: str | bool = True
    targets: tuple[str, ...] = SPLIT
    attention: str = "sdpa"


ARCHITECTURES: Mapping[str, Architecture] = {
    "Qwen2.5-7B": Architecture("Qwen2"),
    "Qwen2.5-0.5B": Architecture("Qwen2", tied=True),
    "Qwen3-8B": Architecture("Qwen3", {"head_dim": 32}),
    "Llama-3.1-8B": Architecture("Llama", {"rope_parameters": LLAMA3_ROPE}, pad="none", chat_template=False),
    "Mistral-7B-v0.3": Architecture("Mistral", {"sliding_window": None}, tokenizer="metaspace", pad="none"),
    "Gemma-2-9B": Architecture(
        "Gemma2",
        {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 16},
        tied=True,
        tokenizer="metaspace",
        chat_template=GEMMA,
        attention="eager",
    ),
    "Phi-4": Architecture("Phi3", {"pad_token_id": 3}, pad="eos", targets=FUSED),
    "Phi-3.5-mini": Architecture(
        "Phi3",
        {"pad_token_id": 3, "rope_parameters": LONG_ROPE, "original_max_position_embeddings": 1024},
        tokenizer="metaspace",
        targets=FUSED,
    ),
    "SmolLM2-135M": Architecture("Llama", tied=True, pad="eos"),
}


def build_architecture(name: str, folder: Path) -> Path:
    """Write the tiny model of that name with its tokenizer to `folder` and return it.

    Two layers of 64 wide, which NF4 needs at least.
    """
    import torch
    import transformers

    made = ARCHITECTURES[name]
    tokenizer = build_tiny_tokenizer(made.tokenizer, made.pad, bool(made.chat_template))
    if isinstance(made.chat_template, str):
        tokenizer.add_special_tokens({"additional_special_tokens": ["<start_of_turn>", "<end_of_turn>"]})
        tokenizer.chat_template = made.chat_template
    shape = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": made.tied,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        **made.special,
    }
    config = getattr(transformers, f"{made.kind}Config")(**shape)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(transformers, f"{made.kind}ForCausalLM")(config)
    folder.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(folder)  # as the real ones are stored
    tokenizer.save_pretrained(folder)
    return folder
