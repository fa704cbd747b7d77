"""Tiny Qwen2 and Llama models with their own tokenizers, made offline for tests.

`build_tiny_tokenizer` needs `transformers`; `build_tiny_model` needs torch as well and takes about a second.
"""

from pathlib import Path
from typing import Any, Literal

CORPUS = """
You get a task and, for some tasks, a piece of text that goes with it. Read both and then give your answer.
You get a task. Read it and then give your answer in full. Do not repeat the task. Answer in plain words.
### Instruction: ### Input: ### Response: ### Human: ### Assistant:
Name a color. red green blue yellow What is two plus two? four five six seven eight nine ten
Translate to French. cat chat dog chien house maison water eau The sky is blue and the grass is green.
Summarize the text. A short text about cats and dogs. Count from one to ten. one two three four
user system assistant You are a helpful assistant. Hello, how can I help you today? I am fine, thanks.
"""
CHATML = (
    "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA2 = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + eos_token }}{% endif %}{% endfor %}"
)
VOCABULARY_SIZE = 420

Kind = Literal["qwen2", "llama"]
TokenizerKind = Literal["bytelevel", "metaspace"]
Pad = Literal["own", "none", "eos"]


def build_tiny_tokenizer(tokenizer: TokenizerKind = "bytelevel", pad: Pad = "own", chat_template: bool = True) -> Any:
    """Return a fast tokenizer of 420 tokens.

    bytelevel: <|endoftext|> is eos, turns are ChatML, no BOS (as Qwen). metaspace: <s> </s> <unk>, byte fallback, the
    post-processor adds the BOS and the template writes it too (as Llama 2). `pad`: a token of its own, none, or eos.
    """
    from transformers import PreTrainedTokenizerFast

    backend, names = _train_bytelevel(pad) if tokenizer == "bytelevel" else _train_metaspace(pad)
    made = PreTrainedTokenizerFast(tokenizer_object=backend, **names)
    if chat_template:
        made.chat_template = CHATML if tokenizer == "bytelevel" else LLAMA2
    made.model_max_length = 2048
    return made


def build_tiny_model(
    folder: Path,
    kind: Kind = "qwen2",
    tokenizer: TokenizerKind = "bytelevel",
    tied: bool = False,
    pad: Pad = "own",
    chat_template: bool = True,
    num_layers: int = 2,
    hidden_size: int = 32,
    seed: int = 0,
) -> Path:
    """Write a float32 model with random weights and its tokenizer to `folder` and return it.

    NF4 needs a `hidden_size` that is a multiple of 64. The weights depend on `seed` alone.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    made = build_tiny_tokenizer(tokenizer, pad, chat_template)
    config_class, model_class = (Qwen2Config, Qwen2ForCausalLM) if kind == "qwen2" else (LlamaConfig, LlamaForCausalLM)
    config = config_class(
        vocab_size=len(made),
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 2,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=tied,
        eos_token_id=made.eos_token_id,
        pad_token_id=made.pad_token_id,
        bos_token_id=made.bos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    made.save_pretrained(folder)
    return folder


def _train_bytelevel(pad: Pad) -> tuple[Any, dict[str, str]]:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(["<|pad|>"] if pad == "own" else [])]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE, special_tokens=specials, show_progress=False, initial_alphabet=alphabet
    )
    backend.train_from_iterator(_lines(), trainer)
    return backend, {"eos_token": "<|endoftext|>"} | _pad_token(pad, "<|pad|>", "<|endoftext|>")


def _train_metaspace(pad: Pad) -> tuple[Any, dict[str, str]]:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    space = "\u2581"
    backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement=space, prepend_scheme="first")
    backend.decoder = decoders.Sequence(
        [decoders.Replace(space, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    specials = ["<unk>", "<s>", "</s>", *(["<pad>"] if pad == "own" else [])]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY_SIZE, show_progress=False, special_tokens=[*specials, *bytes_])
    backend.train_from_iterator(_lines(), trainer)
    bos = ("<s>", backend.token_to_id("<s>"))
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B", special_tokens=[bos])
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return backend, names | _pad_token(pad, "<pad>", "</s>")


def _pad_token(pad: Pad, own: str, eos: str) -> dict[str, str]:
    return {} if pad == "none" else {"pad_token": own if pad == "own" else eos}


def _lines() -> list[str]:
    return [line for line in CORPUS.strip().splitlines() if line] * 3
