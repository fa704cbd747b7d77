"""The larger of the benchmarks' models: a Qwen2 of 4 layers, 256 wide, with random weights."""

from pathlib import Path


def build_base(tokenizer: Path, folder: Path, vocabulary: int) -> Path:
    """Save the model with random weights, and the tokenizer beside it; a head of at least `vocabulary` tokens."""
    import torch
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    loaded = AutoTokenizer.from_pretrained(tokenizer)
    torch.manual_seed(0)
    shape = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2}
    Qwen2ForCausalLM(Qwen2Config(vocab_size=max(len(loaded), vocabulary), **shape, **heads)).save_pretrained(folder)
    loaded.save_pretrained(folder)
    return folder
