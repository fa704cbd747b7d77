"""What TRL's SFTTrainer does to rows before training, timed: `trl_preparation.py ROWS TOKENIZER MAX_LENGTH FORM`.

Runs in an environment that has TRL. FORM is messages, whose every token is trained, or prompt_completion, which trains
the answers alone, as tunebook does. Only `_prepare_dataset` counts: neither reading the file nor making the trainer.
"""

import json
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from datasets import Dataset
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM
from trl import SFTConfig, SFTTrainer

from data_speed import AnonymousPeak, chat_of


class TimedTrainer(SFTTrainer):  # type: ignore[misc]
    """Notes how long the preparation of its rows took."""

    def _prepare_dataset(self, *args: Any, **kwargs: Any) -> Any:
        memory, began = AnonymousPeak(), time.perf_counter()
        prepared = super()._prepare_dataset(*args, **kwargs)
        self.found = {"seconds": time.perf_counter() - began, "grown_bytes": memory.stop()}
        return prepared


def as_form(row: dict[str, str], form: str) -> dict[str, Any]:
    """Return an Alpaca row as SFTTrainer takes it."""
    question, answer = chat_of(row)
    if form == "messages":
        return {"messages": [question, answer]}
    return {"prompt": [question], "completion": [answer]}


def main(rows: Path, tokenizer: Path, max_length: int, form: str) -> None:
    """Print seconds, bytes and tokens as JSON."""
    loaded = AutoTokenizer.from_pretrained(tokenizer)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(loaded),
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
        )
    )
    data = Dataset.from_list([as_form(row, form) for row in json.loads(rows.read_text(encoding="utf-8"))])
    with TemporaryDirectory() as folder:
        args = SFTConfig(output_dir=folder, max_length=max_length, use_cpu=True, report_to="none", bf16=False)
        trainer = TimedTrainer(model=model, args=args, train_dataset=data, processing_class=loaded)
    assert len(trainer.train_dataset) == len(data)
    print(json.dumps({**trainer.found, "tokens": sum(map(len, trainer.train_dataset["input_ids"]))}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
