"""The sections of a recipe that are tunebook's own, and the recipe as the rest of the program sees it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """A section whose keys are tunebook's own."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ModelSection(Section):
    """The base model and the type it computes in."""

    name_or_path: str = Field(min_length=1, description="A Hub id, or a local folder.")
    revision: str | None = Field(None, min_length=1, description="Branch, tag or commit of a Hub model.")
    base_id: str | None = Field(None, min_length=1, description="The public name of a base loaded from a folder.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Compute type. auto: bfloat16 on a GPU that has it, float32 elsewhere."
    )
    attn_implementation: Literal["eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"] | None = (
        Field(None, description="Attention backend; transformers chooses when absent.")
    )


class DataSection(Section):
    """The rows, and how they become labelled tokens."""

    path: str = Field(min_length=1, description="A Hub id, a file or a folder.")
    revision: str | None = Field(None, min_length=1, description="Branch, tag or commit of a Hub data set.")
    split: str = Field("train", min_length=1, description="Which split of a Hub data set.")
    format: Literal["alpaca"] = Field("alpaca", description="The form of a row.")
    template: Literal["auto", "alpaca"] = Field(
        "auto", description="auto: the model's chat template, or the Alpaca text for a model without one."
    )
    max_length: int = Field(
        1024, ge=2, description="Longest row in tokens; on_overflow says what becomes of longer ones."
    )
    on_overflow: Literal["truncate", "drop", "error"] = Field(
        "truncate", description="Rows longer than max_length: cut at the end, left out, or refused."
    )
    max_truncated_fraction: float = Field(
        1.0, ge=0, le=1, description="More rows cut or dropped for their length than this refuses the run."
    )
    validation: float = Field(0.0, ge=0, lt=1, description="Fraction of rows held out, drawn with the seed.")
    answer_rows: int = Field(
        3, ge=0, description="Held-out rows answered greedily before and after training, and compared."
    )
    packing: bool = Field(
        False, description="Join the rows of a micro-batch to one sequence without padding; the result is the same."
    )
    max_bad_fraction: float = Field(0.001, ge=0, le=1, description="More unusable rows than this refuses the run.")


class BatchSection(Section):
    """tunebook's own keys of `training:`; those of TrainingArguments are in `Recipe.arguments`."""

    global_batch_size: int | None = Field(None, ge=1, description="Rows of one optimizer step over all processes.")
    learning_rate_scaling: Literal["none", "linear", "sqrt"] = Field(
        "none", description="How the rate grows with the number of processes when the batch does."
    )
    learning_rate_base_processes: int = Field(1, ge=1, description="The number of processes the rate was chosen for.")
    check_replicas: int | None = Field(None, ge=1, description="Compare the ranks' weights, bit by bit, every N steps.")


@dataclass(frozen=True)
class Recipe:
    """An accepted recipe. Everything in it has been checked, as far as that goes without importing torch.

    `arguments`, `quantization` and `lora` hold what the author wrote for TrainingArguments, BitsAndBytesConfig and
    LoraConfig, by their own names; `quantization` or `lora` is None where the section is absent. `resolved` is the
    whole recipe as nested plain values, which read again give the same recipe. `overridden` names the dotted keys that
    came from the command line, `places` says where each key was written (`recipes/x.yaml:12`). `notes` are things the
    author should know, one line each.
    """

    path: str
    stem: str
    model: ModelSection
    data: DataSection
    batch: BatchSection
    arguments: Mapping[str, Any]
    quantization: Mapping[str, Any] | None
    lora: Mapping[str, Any] | None
    resolved: Mapping[str, Any]
    overridden: frozenset[str] = frozenset()
    places: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def seed(self) -> int:
        """The seed of adapter weights, dropout and row order; 42 by default, as in TrainingArguments."""
        return int(self.arguments.get("seed", 42))

    @property
    def data_seed(self) -> int:
        """The seed of the validation split and the row order; the recipe's seed unless `data_seed` is given."""
        given = self.arguments.get("data_seed")
        return self.seed if given is None else int(given)

    @property
    def ddp_timeout(self) -> int:
        """Seconds after which a collective that waits fails; 1800 by default, as in TrainingArguments."""
        return int(self.arguments.get("ddp_timeout", 1800))
