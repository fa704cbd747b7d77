"""Whether a model keeps rows apart that are joined to one sequence: looked at, not looked up."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

from tunebook.errors import Problem, Refused
from tunebook.recipe.schema import Recipe
from tunebook.training.batches import IGNORED_LABEL, join_rows, tensors_of
from tunebook.training.row_masks import attention_of, known_rows

# Of the row before and of the row that is looked at, in tokens: four passes of at most 22, whatever the model's size.
ROW_LENGTHS = (13, 9)
# Masked attention passes on a gradient of exactly 0, in float32 and in bfloat16, with sdpa and eager (27 tiny
# architectures). Where only some layers leak it is 0.2 % of the row's own at the least (Lfm2, Jamba), of which the
# logits in bfloat16 show nothing.
MOST_REACHED = 1e-6
# Of what a row before it in full view does to a row's logits, so much may be rounding: joined, it goes through larger
# kernels than alone. Measured on the same: up to 6e-7 in float32, 0.013 in bfloat16.
MOST_MOVED = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.25}
# Of the logits' size: a model to which no row before matters at all moves by rounding only.
ROUNDING = 1e-5


class Apart(NamedTuple):
    """How far one row is from what it is alone, when another is joined before it.

    `reached`: the gradient of its logits at the embeddings of the row before, as a part of that at its own. `moved`:
    the largest difference to its logits alone. `in_view`: the same where the two are one row. `size`: its largest logit
    alone.
    """

    reached: float
    moved: float
    in_view: float
    size: float

    def holds(self, compute_dtype: str) -> bool:
        """Whether the row is what it is alone, as far as rounding lets that be seen."""
        most_moved = MOST_MOVED[compute_dtype] * self.in_view + ROUNDING * self.size
        return self.reached <= MOST_REACHED and self.moved <= most_moved


def check_rows_apart(recipe: Recipe, model: Any, compute_dtype: str) -> None:
    """Raise Refused where the rows of a micro-batch, joined to one sequence, would see each other in this model.

    Restarted positions keep rows apart only where the architecture hands them to an attention that minds them: layers
    that carry a state along (Mamba, linear attention) don't, nor do models without positions (Bloom, MPT).
    """
    name = f"{recipe.model.name_or_path} ({type(_bare(model)).__name__})"
    config = model.config.get_text_config()
    chunk = getattr(config, "attention_chunk_size", None)
    if chunk is not None:
        reason = f"attends in chunks of {chunk} tokens, which are counted from the start of the joined rows"
        raise _refusal(recipe, f"{name} {reason}")
    try:
        apart = measure_apart(model, compute_dtype, compiled=recipe.compiles)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise _refusal(recipe, f"{name} takes no joined rows: {' '.join(str(error).split())}") from error
    if not apart.holds(compute_dtype):
        attention = getattr(config, "_attn_implementation", None)
        reason = f"would let joined rows see each other, with attention {attention}: the row before has a part of "
        reason += f"{apart.reached:.1g} in a row's gradient, and moves its logits by {apart.moved:.1g}"
        raise _refusal(recipe, f"{name} {reason}")


def measure_apart(model: Any, compute_dtype: str, compiled: bool = False) -> Apart:
    """Run three small forward passes of random rows, one with its gradient; torch's own seed is left alone.

    The model is left in the mode it was found in, and its parameters get no gradient. One that will be `compiled` is
    run as it trains then, with the masks that transformers makes.
    """
    generator = torch.Generator().manual_seed(0)
    vocabulary = len(model.get_input_embeddings().weight)
    before, row = (torch.randint(vocabulary, (length,), generator=generator).tolist() for length in ROW_LENGTHS)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            alone = _logits_of_row(model, compute_dtype, compiled, [row])
            in_view = _logits_of_row(model, compute_dtype, compiled, [before + row])
        with _caught_embeddings(model) as embeddings:
            joined = _logits_of_row(model, compute_dtype, compiled, [before, row])
        direction = torch.randn(joined.shape, generator=generator).to(joined.device)
        [gradient] = torch.autograd.grad((joined * direction).sum(), embeddings)
    finally:
        model.train(was_training)
    sizes = gradient[0].abs().amax(dim=-1).float()
    return Apart(
        reached=float(sizes[: len(before)].max() / sizes[len(before) :].max()),
        moved=_difference(joined, alone),
        in_view=_difference(in_view, alone),
        size=float(alone.abs().max()),
    )


@contextmanager
def _caught_embeddings(model: Any) -> Iterator[list[torch.Tensor]]:
    """Give a list to which the embeddings of the next forward pass are added, as the start of its gradient."""
    caught: list[torch.Tensor] = []

    def catch(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        caught.append(output.detach().requires_grad_())
        return caught[-1].clone()  # some models write into what they get

    handle = model.get_input_embeddings().register_forward_hook(catch)
    try:
        with torch.enable_grad():
            yield caught
    finally:
        handle.remove()


def _logits_of_row(model: Any, compute_dtype: str, compiled: bool, rows: list[list[int]]) -> torch.Tensor:
    """Return the logits of the last of the joined rows, (tokens of that row, vocabulary) in float32."""
    micro_batch = join_rows([{"input_ids": row, "labels": [IGNORED_LABEL] * len(row)} for row in rows])
    device, dtype = model.get_input_embeddings().weight.device, getattr(torch, compute_dtype)
    inputs = tensors_of(micro_batch, str(device))
    del inputs["labels"]
    precision = torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32)
    with nullcontext(inputs) if compiled else known_rows(attention_of(model), inputs) as given, precision:
        logits: torch.Tensor = model(**given, use_cache=False).logits[0, -ROW_LENGTHS[1] :]
    return logits.float()


def _difference(one: torch.Tensor, two: torch.Tensor) -> float:
    return float((one - two).detach().abs().max())


def _bare(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _refusal(recipe: Recipe, message: str) -> Refused:
    return Refused(Problem(message, "Set data.packing: false", recipe.path, "data.packing"))
