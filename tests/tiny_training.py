"""What the tests of model, batches, training and adapter share: a tiny base, its recipe, plan and rows."""

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunebook.launching.world import World
from tunebook.plan.plan import Plan, build_plan, with_split
from tunebook.recipe.schema import BatchSection, DataSection, ModelSection, Recipe

NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
LORA = {"r": 4, "lora_alpha": 8}
STOP, PAD = 257, 256
TEMPLATE = "{% for m in messages %}{{ m['content'] }}<|end|>{% endfor %}"


@dataclass(frozen=True)
class TinyExample:
    """A held-out prompt and its right answer."""

    prompt: str
    prompt_ids: list[int]
    answer: str


@dataclass(frozen=True)
class TinyData:
    """Rows in the form that training takes them, without a file behind them."""

    train: Any
    evaluation: Any
    examples: tuple[TinyExample, ...]
    stop_token_id: int = STOP
    num_bad_rows: int = 0
    longest_row: int = 41
    num_truncated_rows: int = 0
    num_dropped_rows: int = 0
    data_fingerprint: str = "tiny"
    template: str = "chat template of the model"

    @property
    def num_train_rows(self) -> int:
        return len(self.train)

    @property
    def num_eval_rows(self) -> int:
        return 0 if self.evaluation is None else len(self.evaluation)

    @property
    def trained_tokens(self) -> int:
        return sum(label != -100 for row in self.train for label in row["labels"])


def build_base(folder: Path, **changes: Any) -> Path:
    """Save a seeded Qwen2 of 64 wide with a byte tokenizer (bytes, <|endoftext|>, <|end|>) and return its folder."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<|endoftext|>", "<|end|>"]
    byte_tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, []))
    byte_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    byte_tokenizer.decoder = decoders.ByteLevel()
    byte_tokenizer.add_special_tokens(["<|endoftext|>", "<|end|>"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer, pad_token="<|endoftext|>", eos_token="<|end|>", chat_template=TEMPLATE
    )
    shape = {
        "vocab_size": len(tokens),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "pad_token_id": PAD,
        "eos_token_id": STOP,
        **changes,
    }
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**shape))
    folder.mkdir(parents=True, exist_ok=True)
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    save_weights(model, folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_weights(model: Any, folder: Path) -> None:
    """Save weights without the progress bar that save_pretrained shows."""
    from safetensors.torch import save_file

    tied = set(model._tied_weights_keys or ()) if model.config.tie_word_embeddings else set()
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name not in tied}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def build_recipe(
    base: Path | str,
    *,
    lora: dict[str, Any] | None = LORA,
    quantization: dict[str, Any] | None = None,
    global_batch_size: int | None = 8,
    validation: float = 0.2,
    model: dict[str, Any] | None = None,
    batch: dict[str, Any] | None = None,
    packing: bool = False,
    **arguments: Any,
) -> Recipe:
    """Return an accepted recipe on a base folder; `arguments` are those of TrainingArguments, `batch` our own."""
    written = {"per_device_train_batch_size": 2, "learning_rate": 1e-3, "save_strategy": "no", **arguments}
    sections = {"model": str(base), "lora": lora, "quantization": quantization, "training": written}
    return Recipe(
        path="recipes/tiny.yaml",
        stem="tiny",
        model=ModelSection(name_or_path=str(base), dtype="float32", **(model or {})),
        data=DataSection(path="rows.jsonl", validation=validation, packing=packing),
        batch=BatchSection(global_batch_size=global_batch_size, **(batch or {})),
        arguments=written,
        quantization=quantization,
        lora=lora,
        resolved=json.loads(json.dumps(sections | {"data": {"packing": packing}})),
    )


def build_data(num_rows: int = 21, num_eval_rows: int = 7, num_examples: int = 3, seed: int = 0) -> TinyData:
    """Return rows of 4 to 40 random bytes, of which the first third is a prompt and the last token is the stop."""
    import datasets

    draw = random.Random(seed)
    rows = [[draw.randrange(32, 127) for _ in range(draw.randrange(4, 40))] for _ in range(num_rows + num_eval_rows)]
    prepared = [{"input_ids": [*row, STOP], "labels": masked(row), "length": len(row) + 1} for row in rows]
    examples = tuple(
        TinyExample("".join(map(chr, row)), row, "".join(map(chr, row[:3]))) for row in rows[num_rows:][:num_examples]
    )
    columns = datasets.Features(
        {"input_ids": datasets.List(datasets.Value("int32")), "labels": datasets.List(datasets.Value("int32"))}
        | {"length": datasets.Value("int32")}
    )
    train = datasets.Dataset.from_list(prepared[:num_rows], features=columns)
    held_out = datasets.Dataset.from_list(prepared[num_rows:], features=columns) if num_eval_rows else None
    return TinyData(train, held_out, examples)


def masked(row: list[int]) -> list[int]:
    """Return the labels of a row and its stop token, with the first third masked."""
    prompt = max(len(row) // 3, 1)
    return [-100] * prompt + row[prompt:] + [STOP]


def plan_of(recipe: Recipe, world: World, data: TinyData, run_dir: Path | str) -> Plan:
    """Return the plan of a recipe for rows that are there."""
    return with_split(build_plan(recipe, world, run_dir=str(run_dir)), data.num_train_rows, data.num_eval_rows, {})
