"""The loss without the logits of every token: made where labels count, and a piece at a time.

The output layer (the head) turns a hidden state into as many logits as the vocabulary has tokens: 4,096 states and a
vocabulary of 152,064 make 2.5 GB in float32, three times over at the loss's backward. Here the head computes the loss
itself, inside the model's forward: from the states whose next token is a label alone, and, where they are many, in
pieces. A frozen head gives each piece's gradient together with its loss, so that its logits are made once and not kept;
one that is trained makes them again in the backward. Sum and gradient are those of the plain way, to rounding.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from tunebook.plan.memory import LOGITS_AT_ONCE
from tunebook.training.batches import IGNORED_LABEL, pad_right, tensors_of
from tunebook.training.loss import count_right, summed_token_loss, token_losses
from tunebook.training.row_masks import attention_of, known_rows, spares_masks_of

# What the head gives in the look at a model: far enough out for a cap on logits (30 in Gemma 2) to show.
LARGEST_PROBED = 100.0
ROUNDING = {"float32": 1e-5, "bfloat16": 3e-2, "float16": 1e-2}
# What a gradient made with the loss is multiplied by until the backward brings its own factors, a loss scaler's among
# them: float16 takes shares of a token below 3e-8 for 0, and many such pull as one. A power of 2, which rounds nothing.
ROOM_BELOW = 2.0**6
After = Callable[[Any], Any]


class Sums(NamedTuple):
    """Over the labels of a micro-batch that count: the loss (nats, a float64 scalar), and how many are held likeliest.

    `right` is None where it was not asked for.
    """

    loss: Any
    right: Any


class _Asked(NamedTuple):
    """Which labels count, and what of them: whether they are held likeliest, and how far their loss is smoothed."""

    targets: dict[str, Any]
    want_right: bool
    smoothing: float


class _LossWithGradient(torch.autograd.Function):  # type: ignore[misc]  # torch does not say what it is
    """The sums of all pieces, and in the same pass the gradient of the hidden states, which need no logits later."""

    @staticmethod
    def forward(ctx: Any, states: Any, ids: Any, size: int, sum_piece: Callable[[Any, Any], Sums]) -> tuple[Any, Any]:
        gradient, made = torch.empty_like(states), []
        for piece, its_ids, its_gradient in zip(*(one.split(size) for one in (states, ids, gradient)), strict=True):
            leaf = piece.detach().requires_grad_()
            with torch.enable_grad():
                sums = sum_piece(leaf, its_ids)
            room = torch.full_like(sums.loss, ROOM_BELOW)
            with torch.autocast(states.device.type, enabled=False):  # a backward computes as its forward did
                its_gradient.copy_(torch.autograd.grad(sums.loss, leaf, room)[0])
            made.append(Sums(sums.loss.detach(), sums.right))
        ctx.save_for_backward(gradient)
        return _added(made)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, of_loss: Any, _of_right: Any) -> tuple[Any, None, None, None]:
        (gradient,) = ctx.saved_tensors
        # Without a dimension the factor would be rounded to the gradient's type on a GPU: 8 bits in bfloat16, so that
        # rows that come in pieces would weigh up to 0.4 % more or less than those that do not.
        factor = (of_loss / ROOM_BELOW).float().reshape(1)
        return (gradient * factor).to(gradient.dtype), None, None, None


class HeadLoss:
    """Computes the loss of micro-batches by a model whose head it may use piece by piece.

    `is_plain` says that this model's logits are more than its head's output, so that the model makes them all itself.
    """

    def __init__(self, model: Any, compute_dtype: str, in_pieces: bool = True, compiled: bool = False) -> None:
        """Look at what the model makes of its head's output; a model that will be `compiled` is left as it is.

        Replacing its head would have it compiled anew in each step.
        """
        self._in_pieces, self._compiled, self._attention = in_pieces, compiled, attention_of(model)
        self._spared = spares_masks_of(model, compute_dtype)
        self._head = model.get_output_embeddings()
        self._after: After | None = None
        if self._head is None or compiled:
            return
        self._forward = self._head.forward
        self._draws = any(isinstance(part, torch.nn.Dropout) and part.p > 0 for part in self._head.modules())
        with _looking(model, compute_dtype) as inputs:
            self._num_logits, self._after = self._find_after(model, inputs)
            if self._after is not None and not self._agrees(model, inputs, compute_dtype):
                self._after = None

    @property
    def is_plain(self) -> bool:
        """Whether all logits are made, as the model does by itself."""
        return self._after is None

    def sums(
        self,
        model: Any,
        inputs: dict[str, Any],
        targets: dict[str, Any],
        want_right: bool = False,
        smoothing: float = 0.0,
    ) -> Sums:
        """Run `model`, which may be wrapped (DDP), on a micro-batch and return the sums over its labels.

        `inputs` are what the model takes and the labels, `targets` the `positions` and `ids` of the labels that count,
        as `pad_right` and `join_rows` make them, on the model's device. `smoothing` is what `summed_token_loss` does.
        """
        known = nullcontext(inputs) if self._compiled else known_rows(self._attention, inputs, self._spared)
        with known as given:
            ask = _Asked(targets, want_right, smoothing)
            return self._plain_sums(model, given, ask) if self.is_plain else self._sums(model, given, ask)

    def _plain_sums(self, model: Any, given: dict[str, Any], asked: _Asked) -> Sums:
        """Return the sums over the logits of every token. The labels are not for the model, which would average."""
        inputs = {**given, "use_cache": False}
        labels = inputs.pop("labels")
        logits = model(**inputs).logits
        right = count_right(logits, labels) if asked.want_right else None
        return Sums(summed_token_loss(logits, labels, asked.smoothing), right)

    def _sums(self, model: Any, given: dict[str, Any], asked: _Asked) -> Sums:
        inputs = {**given, "use_cache": False}
        del inputs["labels"]
        found: list[Sums] = []

        def loss_of(hidden: Any) -> Any:
            found.append(self._sum_pieces(hidden, asked))
            # Where the model expects its logits. DDP looks for what takes part among a model's outputs.
            return found[-1].loss.to(hidden.dtype).reshape(1, 1, 1)

        with self._head_replaced(loss_of):
            model(**inputs)
        [sums] = found
        return sums

    @contextmanager
    def _head_replaced(self, forward: Callable[[Any], Any]) -> Iterator[None]:
        had_own = "forward" in self._head.__dict__
        self._head.forward = forward
        try:
            yield
        finally:
            del self._head.forward
            if had_own:
                self._head.forward = self._forward

    def _find_after(self, model: Any, inputs: dict[str, Any]) -> tuple[int, After | None]:
        """Return how many logits a state has, and what the model makes of them; None where that is not known.

        The head gives numbers known beforehand, and the model's logits show what became of them.
        """
        given: list[Any] = []

        def probe(hidden: Any) -> Any:
            with torch.enable_grad():
                logits = self._forward(hidden)
            self._trained = logits.requires_grad
            numbers = torch.linspace(-LARGEST_PROBED, LARGEST_PROBED, logits.numel(), device=hidden.device)
            given.append(numbers.reshape(logits.shape))
            return given[-1]

        with self._head_replaced(probe):
            outputs = model(**inputs)
        # A loss of its own beside that of the labels (of a router) is for the model to add.
        if len(given) != 1 or getattr(outputs, "aux_loss", None) is not None:
            return 0, None
        [numbers] = given
        made = outputs.logits
        if made.shape != numbers.shape or numbers.shape[:2] != inputs["input_ids"].shape:
            return 0, None
        return numbers.shape[-1], _explain(numbers, made.to(numbers.dtype), model.config.get_text_config())

    def _agrees(self, model: Any, inputs: dict[str, Any], compute_dtype: str) -> bool:
        """Return whether the loss of two small rows is that of the model's own logits."""
        ids = inputs["input_ids"].cpu()
        rows = pad_right([{"input_ids": row.tolist(), "labels": row.tolist()} for row in ids])
        device = str(inputs["input_ids"].device)
        targets = {name: tensor.to(device) for name, tensor in rows["targets"].items()}
        ours = self.sums(model, tensors_of(rows, device), targets).loss
        plain = summed_token_loss(model(**inputs).logits, tensors_of(rows, device)["labels"])
        return bool((ours - plain).abs() <= ROUNDING[compute_dtype] * plain.abs())

    def _sum_pieces(self, hidden: Any, asked: _Asked) -> Sums:
        """Return the sums for hidden states of shape (rows, tokens, hidden size)."""
        states = hidden.reshape(-1, hidden.shape[-1]).index_select(0, asked.targets["positions"])
        size = max(1, LOGITS_AT_ONCE // self._num_logits) if self._in_pieces else len(states)
        ids, sum_piece = asked.targets["ids"], partial(self._sum_piece, asked=asked)
        if len(states) <= size:
            return sum_piece(states, ids)
        if torch.is_grad_enabled() and states.requires_grad and not self._is_trained():
            return Sums(*_LossWithGradient.apply(states, ids, size, sum_piece))
        if torch.is_grad_enabled():
            sum_piece = partial(checkpoint, sum_piece, use_reentrant=False, preserve_rng_state=self._draws)
        return _added([sum_piece(*piece) for piece in zip(states.split(size), ids.split(size), strict=True)])

    def _is_trained(self) -> bool:
        """Return whether the head has a gradient: when it was looked at, or because a callback thawed it since."""
        return self._trained or any(weight.requires_grad for weight in self._head.parameters())

    def _sum_piece(self, states: Any, ids: Any, asked: _Asked) -> Sums:
        assert self._after is not None, "only for heads that were looked at"
        logits = self._after(self._forward(states)).float()
        losses = token_losses(logits, ids, asked.smoothing)
        right = ((logits.argmax(dim=-1) == ids) & (ids != IGNORED_LABEL)).sum() if asked.want_right else None
        return Sums(losses.sum(dtype=torch.float64), right)


def _added(pieces: list[Sums]) -> Sums:
    """Return the sums of all pieces."""
    right = None if pieces[0].right is None else torch.stack([one.right for one in pieces]).sum()
    return Sums(torch.stack([one.loss for one in pieces]).sum(), right)


def _explain(numbers: Any, made: Any, config: Any) -> After | None:
    """Return the function that made `made` of `numbers`: themselves, a multiple of them, or a cap on them."""
    if torch.equal(made, numbers):
        return lambda logits: logits
    largest = numbers.abs().max()
    scale = float(made.flatten()[-1] / numbers.flatten()[-1])
    candidates: list[After] = [lambda logits: logits * scale]
    if cap := getattr(config, "final_logit_softcapping", None):
        candidates.append(lambda logits: torch.tanh(logits / cap) * cap)
    return next((after for after in candidates if (after(numbers) - made).abs().max() <= 1e-6 * largest), None)


@contextmanager
def _looking(model: Any, compute_dtype: str) -> Iterator[dict[str, Any]]:
    """Give two small rows to run the model on without gradients; it is left in the mode it was found in."""
    embedding = model.get_input_embeddings()
    device, dtype = embedding.weight.device, getattr(torch, compute_dtype)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(len(embedding.weight), (2, 5), generator=generator).to(device)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
            yield {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
    finally:
        model.train(was_training)
