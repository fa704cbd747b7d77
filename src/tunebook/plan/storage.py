"""How a program keeps its numbers, and what it works on: what a prediction of memory needs beside the model's shape."""

from dataclasses import dataclass

from tunebook.plan.trained_parts import TrainedParts

FLOAT32, BOOLEAN = 4, 1


@dataclass(frozen=True)
class Storage:
    """In how many bytes a program keeps each number.

    `quantized` and `constants` are those of a weight of a linear layer in the blocks (0: not quantised), `frozen` of
    any other weight that is not trained, `trained` of a trained weight, with `gradient`, `bucket` (DDP's copy of the
    gradient), `optimizer` (all states) and `step` (what the optimizer computes with). `copies` are what autocast keeps
    of each trained weight in the compute type during the forward. `residual` is the stream between layers, `loss` the
    type of the log-softmax; where it is computed in `loss_chunks` pieces the logits stay in the compute type meanwhile.
    `dequantized` is what one weight needs when it is used, `step_of_largest` each weight of the largest trained tensor
    while the optimizer computes, `mask` each number that dropout looks at. `gives_float32` says that linear layers
    return float32 (plan/layer_memory.py).
    """

    compute: float
    residual: float
    frozen: float
    trained: float = FLOAT32
    gradient: float = FLOAT32
    optimizer: float = 2 * FLOAT32
    bucket: float = 0
    step: float = 0
    step_of_largest: float = 0
    copies: float = 0
    quantized: float = 0
    constants: float = 0
    dequantized: float = 0
    loss: float = FLOAT32
    loss_chunks: int = 1
    converts_inputs: bool = False
    mask: float = BOOLEAN
    gives_float32: bool = False

    @property
    def outputs(self) -> float:
        """Bytes of a number that a linear layer gives to what follows it."""
        return FLOAT32 if self.gives_float32 else self.compute


@dataclass(frozen=True)
class Work:
    """What is trained and on what: `adapter` is the number of trained parameters (None: all weights are trained).

    `parts` says more of an adapter, None where it is LoRA on all linear layers. `dropout` and `dora` are about its
    layers. A batch of the evaluation has `evaluated` rows (0: there is none) of `evaluated_length` tokens.

    A micro-batch has `rows` rows of `length` tokens. `keeps_gradients` says that a step has several micro-batches,
    `logits_at_once` how many logits are made at a time (None: all). `masked` and `repeats_keys` are those of
    `model.attention.Kept`.
    """

    rows: int
    length: int
    adapter: int | None
    rank: int = 0
    checkpointing: bool = True
    keeps_gradients: bool = False
    masked: bool = False
    repeats_keys: bool = False
    eager_attention: bool = False
    logits_at_once: int | None = None
    parts: TrainedParts | None = None
    dropout: bool = False
    dora: bool = False
    evaluated: int = 0
    evaluated_length: int = 0

    @property
    def tokens(self) -> int:
        """Positions of a micro-batch, padding included."""
        return self.rows * self.length
