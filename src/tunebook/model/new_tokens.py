"""Tokens that a recipe adds to a model's vocabulary (`model.add_special_tokens`): their ids, rows and training.

Each is one token wherever it stands in the text of a row. Its rows, in the embedding and in an untied head, start at
the mean of all known ones, which keeps the model's other predictions nearly as they are (Hewitt 2021, Initializing New
Word Embeddings for Pretrained Language Models), and are trained. An adapter holds these rows alone: whoever loads it
needs no more than an embedding with room for them.
"""

from collections.abc import Container, Sequence
from typing import Any

from tunebook.errors import Problem, Refused

KEY = "model.add_special_tokens"


def add_tokens(tokenizer: Any, tokens: Sequence[str]) -> None:
    """Add tokens to a fast tokenizer; raises Refused with those that it has already.

    They are no "special" ones to the tokenizer, which would let a decoder drop them from answers, and a row's text not
    hold them. The one that ends a turn becomes special once the template shows which it is (data.chat_prompts).
    """
    from tokenizers import AddedToken

    known = tokenizer.get_vocab()
    there = [token for token in tokens if token in known]
    if there:
        message = f"{', '.join(there)} {'is' if len(there) == 1 else 'are'} in the vocabulary already"
        raise Refused(Problem(message, "Remove it; rows that hold it need nothing more", key=KEY))
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in tokens])


def largest_id(tokenizer: Any) -> int:
    """Return the largest id of the vocabulary, added tokens included."""
    return int(max(tokenizer.get_vocab().values()))


def make_room(model: Any, tokenizer: Any) -> None:
    """Give embedding and head a row for every id of the tokenizer; a model that has them stays as it is."""
    rows = largest_id(tokenizer) + 1
    if rows > model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(rows, mean_resizing=False)


def start_rows(model: Any, ids: Sequence[int]) -> None:
    """Set the rows of new tokens, in the embedding and in the head, to the mean of the rows before the first of them.

    The same on every rank: nothing is drawn. Rows of another type are averaged in float32.
    """
    import torch

    layers = [model.get_input_embeddings(), model.get_output_embeddings()]
    with torch.no_grad():
        for weight in {id(layer.weight): layer.weight for layer in layers}.values():
            weight[list(ids)] = weight[: min(ids)].float().mean(0).to(weight.dtype)


def trained_rows(model: Any, ids: Sequence[int], whole: Container[int] = ()) -> dict[str, list[int]]:
    """Return trainable_token_indices of LoraConfig for these ids: in the embedding, and in a head that is not tied.

    Layers of which the id() is in `whole` have all their rows trained, and are left out.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head.weight is embedding.weight or model.config.get_text_config().tie_word_embeddings
    wanted = [module for module in ([embedding] if tied else [embedding, head]) if id(module) not in whole]
    names = {id(module): name.rpartition(".")[2] for name, module in model.named_modules()}
    return {names[id(module)]: sorted(ids) for module in wanted}
