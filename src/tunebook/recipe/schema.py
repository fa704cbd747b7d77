"""The sections of a recipe that are tunebook's own, and the recipe as the rest of the program sees it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

# What `per_device_train_batch_size` and `activation_checkpointing` say where the program is to choose.
AUTO: Final = "auto"


class Section(BaseModel):
    """A section whose keys are tunebook's own."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ModelSection(Section):
    """The base model and the type it computes in."""

    name_or_path: str = Field(min_length=1, description="A Hub id, or a local folder.")
    revision: str | None = Field(None, min_length=1, description="Branch, tag or commit of a Hub model.")
    base_id: str | None = Field(None, min_length=1, description="The public name of a base loaded from a folder.")
    add_special_tokens: list[str] | None = Field(
        None, min_length=1, description="New tokens of the vocabulary; their rows alone are trained beside the adapter."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Compute type. auto: bfloat16 on a GPU that has it, float32 elsewhere."
    )
    attn_implementation: Literal["eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"] | None = (
        Field(None, description="Attention backend; transformers chooses when absent.")
    )


FormName = Literal["auto", "alpaca", "messages", "sharegpt", "prompt_completion", "text"]
# The parts of a row by the column that each form has them in, and the parts that no row can do without.
FORM_COLUMNS: Final[Mapping[str, Mapping[str, str]]] = {
    "alpaca": {"prompt": "instruction", "input": "input", "response": "output", "system": "system"},
    "messages": {"messages": "messages", "tools": "tools", "system": "system"},
    "sharegpt": {"messages": "conversations", "tools": "tools", "system": "system"},
    "prompt_completion": {"prompt": "prompt", "response": "completion", "system": "system", "tools": "tools"},
    "text": {"text": "text"},
}
FORM_REQUIRED: Final[Mapping[str, tuple[str, ...]]] = {
    "alpaca": ("prompt", "response"),
    "messages": ("messages",),
    "sharegpt": ("messages",),
    "prompt_completion": ("prompt", "response"),
    "text": ("text",),
}


class SourceSection(Section):
    """One entry of `data.sources`: rows from one place, and how much of them an epoch takes."""

    path: str = Field(min_length=1, description="A Hub id, a file, a folder or a pattern such as data/*.jsonl.")
    revision: str | None = Field(None, min_length=1, description="Branch, tag or commit of a Hub data set.")
    split: str = Field("train", min_length=1, description="Which split of a Hub data set.")
    format: FormName = Field("auto", description="The form of a row; auto tells it by the columns.")
    columns: dict[str, str] | None = Field(None, description="The column of each part: {prompt: ..., response: ...}.")
    weight: float = Field(1.0, gt=0, le=1000, description="How often a row counts; 0.5 draws half of them.")
    rows: int | None = Field(None, ge=1, description="How many rows are drawn, instead of a weight.")


class DataSource(SourceSection):
    """One source with everything that is said of it; `key` is where the recipe says it."""

    key: str = "data"


class DataSection(Section):
    """The rows, and how they become labelled tokens."""

    path: str | None = Field(None, min_length=1, description="A Hub id, a file, a folder or a pattern.")
    sources: list[SourceSection] | None = Field(None, min_length=1, description="Several places, instead of a path.")
    revision: str | None = Field(None, min_length=1, description="Branch, tag or commit of a Hub data set.")
    split: str = Field("train", min_length=1, description="Which split of a Hub data set.")
    format: FormName = Field("auto", description="The form of a row; auto tells it by the columns.")
    columns: dict[str, str] | None = Field(None, description="The column of each part: {prompt: ..., response: ...}.")
    deduplicate: bool = Field(False, description="Drop rows that are exactly like an earlier one.")
    template: str = Field(
        "auto", description="auto: the model's chat template, else the Alpaca text; alpaca, chatml, or a .jinja file."
    )
    train_on: Literal["responses", "last_response", "all"] = Field(
        "responses", description="Which tokens of a conversation are trained: every answer, the last, or everything."
    )
    max_length: int = Field(
        1024, ge=2, le=10**9, description="Longest row in tokens; on_overflow says what becomes of longer ones."
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

    def all_sources(self) -> list[DataSource]:
        """Return the sources in order; one without its own format or columns has those of the section."""
        if self.sources is None:
            assert self.path is not None, "a recipe without path and sources is refused"
            shared = {name: getattr(self, name) for name in ("revision", "split", "format", "columns")}
            return [DataSource(path=self.path, **shared)]
        inherited = {"format": self.format, "columns": self.columns}
        return [
            DataSource(**{**inherited, **source.model_dump(exclude_unset=True)}, key=f"data.sources[{number}]")
            for number, source in enumerate(self.sources)
        ]


class BatchSection(Section):
    """tunebook's own keys of `training:`; those of TrainingArguments are in `Recipe.arguments`."""

    global_batch_size: int | None = Field(None, ge=1, description="Rows of one optimizer step over all processes.")
    learning_rate_scaling: Literal["none", "linear", "sqrt"] = Field(
        "none", description="How the rate grows with the number of processes when the batch does."
    )
    learning_rate_base_processes: int = Field(1, ge=1, description="The number of processes the rate was chosen for.")
    check_replicas: int | None = Field(None, ge=1, description="Compare the ranks' weights, bit by bit, every N steps.")
    fused_loss: Literal["auto", "off"] = Field(
        "auto",
        description="auto: the logits of many tokens are made in pieces; off: all at once. The loss is the same.",
    )


class HubSection(Section):
    """Where a finished run is published; without the section nothing ever is."""

    repo: str = Field(min_length=1, description="The repository on the Hub: owner/name. It is made where it is absent.")
    private: bool = Field(False, description="Seen by its owners alone; an existing public one is refused.")
    revision: str | None = Field(None, min_length=1, description="The branch that is pushed to; main by default.")


@dataclass(frozen=True)
class Recipe:
    """An accepted recipe. Everything in it has been checked, as far as that goes without importing torch.

    `arguments`, `quantization` and `lora` hold what the author wrote for TrainingArguments, BitsAndBytesConfig and
    LoraConfig, by their own names; `quantization`, `lora` or `hub` is None where the section is absent. `resolved` is
    the whole recipe as nested plain values, which read again give the same recipe. `overridden` names the dotted keys
    that came from the command line, `places` says where each key was written (`recipes/x.yaml:12`). `notes` are things
    the author should know, one line each.
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
    hub: HubSection | None = None

    @property
    def chooses_micro_batch(self) -> bool:
        """Whether the micro-batch is left to the program (`auto`)."""
        return self.arguments.get("per_device_train_batch_size") == AUTO

    @property
    def chooses_checkpointing(self) -> bool:
        """Whether activation checkpointing is left to the program (`auto`)."""
        return self.arguments.get("activation_checkpointing") == AUTO

    @property
    def compiles(self) -> bool:
        """Whether the model is compiled, which TrainingArguments also takes from a backend or a mode of compiling."""
        names = ("torch_compile", "torch_compile_backend", "torch_compile_mode")
        return any(self.arguments.get(name) for name in names)

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
