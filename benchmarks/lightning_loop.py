"""A LoRA training loop by Lightning's DDP strategy, as its users write one: `lightning_loop.py SETTINGS`.

Runs under clock.py in an environment that has Lightning. Rows come in random order, padded to the longest of their
micro-batch; the loss is the model's own mean over a micro-batch, and Lightning averages those. SETTINGS is a JSON
object.
"""

import json
import sys
from typing import Any

import lightning
import torch
from datasets import Dataset
from lightning.pytorch.strategies import DDPStrategy
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from clock import CLOCK, count_labels


def pad(rows: list[dict[str, list[int]]]) -> dict[str, Any]:
    """Return a micro-batch, padded on the right."""
    width = max(len(row["input_ids"]) for row in rows)

    def padded(values: list[list[int]], by: int) -> Any:
        return torch.tensor([value + [by] * (width - len(value)) for value in values])

    return {
        "input_ids": padded([row["input_ids"] for row in rows], 0),
        "attention_mask": padded([[1] * len(row["input_ids"]) for row in rows], 0),
        "labels": padded([row["labels"] for row in rows], -100),
    }


class Loop(lightning.LightningModule):  # type: ignore[misc]
    """The model in training; the first step's labels and losses are noted for the comparison of losses."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__()
        self.settings, self.seen = settings, 0
        self.means: list[tuple[float, int]] = []
        nf4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
        quantized = BitsAndBytesConfig(**nf4, bnb_4bit_compute_dtype=torch.float32) if settings["nf4"] else None
        base = AutoModelForCausalLM.from_pretrained(
            settings["base"], dtype=torch.float32, quantization_config=quantized
        )
        if settings["nf4"]:
            base = prepare_model_for_kbit_training(base, use_gradient_checkpointing=False)
        lora = LoraConfig(r=settings["r"], lora_alpha=settings["alpha"], target_modules="all-linear")
        self.model = get_peft_model(base, LoraConfig(**{**lora.to_dict(), "task_type": "CAUSAL_LM"}))
        # Lightning leaves modules in the mode they are in, and from_pretrained gives models for evaluation.
        self.model.train()

    def training_step(self, batch: dict[str, Any], number: int) -> Any:
        """Return the mean loss of a micro-batch."""
        loss = self.model(**batch, use_cache=False).loss
        if number < self.settings["accumulation"] and not CLOCK.ends:
            self.means.append((loss.detach().item(), count_labels([batch])))
        return loss

    def on_train_batch_end(self, *arguments: Any) -> None:
        """Tell the clock when an optimizer step was taken."""
        if self.trainer.global_step > self.seen:
            self.seen = self.trainer.global_step
            CLOCK.end_step()

    def configure_optimizers(self) -> Any:
        """Return the optimizer that all contestants have."""
        trained = [one for one in self.parameters() if one.requires_grad]
        return torch.optim.AdamW(trained, lr=self.settings["learning_rate"], weight_decay=0.0, fused=True)


def main(settings: dict[str, Any]) -> None:
    """Train, then put the first step's loss together: the mean over all labels of all processes."""
    lightning.seed_everything(0)
    rows = Dataset.from_parquet(settings["rows"])
    loop = Loop(settings)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend="gloo"),
        max_epochs=settings["epochs"],
        accumulate_grad_batches=settings["accumulation"],
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(loop, DataLoader(rows, batch_size=settings["micro_batch"], shuffle=True, collate_fn=pad))
    CLOCK.see_labels(lambda: sum(number for _, number in loop.means))
    sums = torch.tensor([sum(mean * number for mean, number in loop.means), sum(number for _, number in loop.means)])
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(sums)
    CLOCK.see_loss(1, float(sums[0] / sums[1]))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
