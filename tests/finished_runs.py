"""A run that came to its end, trained once for all tests that only read it."""

import atexit
import functools
import shutil
import tempfile
from pathlib import Path

from broken_off import make_place
from fork_server import shared_server


@functools.cache
def finished_place() -> Path:
    """Return a folder with base, rows and recipe.yaml, and its finished run in `runs/recipe`. To be read, not changed.

    Copy it (`shutil.copytree`) to change it; relative paths in the recipe mean the folder itself is the current one.
    """
    folder = Path(tempfile.mkdtemp(prefix="tunebook-finished-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    make_place(folder)
    life = train_in(folder)
    assert life.rank_codes() == [0], life.output()[-3000:]
    return folder


def train_in(folder: Path, *words: str, recipe: str = "recipe.yaml", size: int = 1, **environ: str):
    """Run finetune.py with `recipe` and more `words` in a folder, on `size` processes; return the life that ended."""
    server = shared_server()
    environ = {"TUNEBOOK_CACHE": str(folder / "cache"), **environ}
    return server.wait(server.start([recipe, *words], size, folder, folder / "finetune.log", **environ))
