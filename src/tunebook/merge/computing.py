"""A model computed in another type than its weights are held in, a block of layers at a time.

A checkpoint of 14 GB in bfloat16 is mapped from its file and takes no memory; the same model in float32 would take
28 GB. Here only the block that computes is held in the other type.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

M_MMAP_THRESHOLD = -3  # of malloc.h
MAPPED_BYTES = 2**20


def give_back_freed_memory() -> None:
    """Have the C library return the memory of tensors to the system as soon as they are freed.

    It raises the size from which it does so to 32 MiB as larger ones are freed, and keeps the smaller: converting 60
    layers of 3 M weights, one after another, left 504 MiB behind, and none with the size fixed. Does nothing where the
    C library is not GNU's.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES)


@contextmanager
def computed_in(model: Any, dtype: Any) -> Iterator[None]:
    """Compute `model` (a transformers model, or a PeftModel on one) in `dtype` inside, adapters included.

    The weights are those of `model`, rounded to `dtype` where that is narrower. Buffers stay as they are. Nothing about
    the model is changed afterwards.
    """
    blocks = list(_blocks(model))
    held: dict[int, list[tuple[Any, Any]]] = {}

    def convert(block: Any, _inputs: Any) -> None:
        others = [weight for weight in block.parameters() if weight.is_floating_point() and weight.dtype != dtype]
        held[id(block)] = [(weight, weight.data) for weight in others]
        for weight in others:
            weight.data = weight.data.to(dtype)

    def put_back(block: Any, _inputs: Any, _outputs: Any) -> None:
        for weight, data in held.pop(id(block), ()):
            weight.data = data

    hooks = [block.register_forward_pre_hook(convert) for block in blocks]
    # An error in a block must not leave it converted.
    hooks += [block.register_forward_hook(put_back, always_call=True) for block in blocks]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _blocks(module: Any) -> Iterator[Any]:
    """Return the modules that together own all weights and run one after another.

    They are the members of lists of layers, which may read each other's weights inside, and outside of them whatever
    owns weights itself, with the adapter around it.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper
    from torch.nn import ModuleList

    if isinstance(module, ModuleList):
        yield from module
    elif (
        isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper)
        or next(module.parameters(False), None) is not None
    ):
        yield module
    else:
        for child in module.children():
            yield from _blocks(child)
