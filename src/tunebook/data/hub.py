"""A data set of the Hugging Face Hub as a source of rows."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunebook.data.formats import wanted_columns
from tunebook.data.record import Record
from tunebook.data.tables import records_of_batches
from tunebook.errors import Problem, Refused
from tunebook.recipe.schema import DataSource

_BATCH_ROWS = 1000


@dataclass(frozen=True)
class HubSource:
    """One split of a Hub data set, memory-mapped by `datasets`."""

    name: str
    dataset: Any  # datasets.Dataset
    section: DataSource
    notes: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The data set's id, as its only part."""
        return (self.name,)

    @property
    def sections(self) -> tuple[DataSource, ...]:
        """What the recipe says of it."""
        return (self.section,)

    def records(self, part: int) -> Iterator[Record]:
        """Yield the rows of the split; columns that no row needs (images, say) are not decoded."""
        assert part == 0, "a Hub source has one part"
        columns = wanted_columns(self.dataset.column_names, self.section)
        rows = self.dataset.select_columns(columns) if columns else self.dataset
        yield from records_of_batches(rows.with_format("arrow").iter(batch_size=_BATCH_ROWS))

    def content_digest(self) -> str:
        """Return the sha256 of the split's Arrow files and of the rows chosen from them.

        `datasets` writes the same files for the same revision; a split such as `train[:10%]` maps the same file.
        """
        digest = hashlib.sha256(f"{self.dataset.num_rows} {self.dataset.split}".encode())
        files = [Path(entry["filename"]) for entry in self.dataset.cache_files]
        if not files:  # not backed by files: the fingerprint covers what made it
            digest.update(self.dataset._fingerprint.encode())
        for path in files:
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        return digest.hexdigest()


def load_hub_source(section: DataSource) -> HubSource:
    """Load one split of a Hub data set, from the `datasets` cache or the network.

    Raises `Refused` where the id, the revision or the split is unknown, access is denied or the Hub can't be reached.
    """
    import datasets

    path, revision, place = section.path, section.revision, section.key
    try:
        dataset = datasets.load_dataset(path, revision=revision, split=section.split)
    except datasets.exceptions.DatasetNotFoundError as error:
        raise Refused(_not_found(section, str(error))) from error
    except ConnectionError as error:
        message = f"no file or folder {path} here, and the Hub can't be reached to look for a data set of that name"
        fix = "Correct the path, or go online once so that the data set is cached"
        raise Refused(Problem(message, fix, key=f"{place}.path")) from error
    except (datasets.exceptions.DatasetsError, ValueError, OSError, RuntimeError) as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        key = f"{place}.split" if "split" in reason.lower() else f"{place}.path"
        fix = "See the data set's page on the Hub for its splits and files"
        raise Refused(Problem(f"the Hub data set {path} can't be loaded: {reason}", fix, key=key)) from error
    return HubSource(path, dataset, section)


def _not_found(section: DataSource, reason: str) -> Problem:
    path, revision, key = section.path, section.revision, f"{section.key}.path"
    if "gated" in reason.lower():
        message = f"the Hub data set {path} is gated"
        return Problem(message, "Ask for access on its page, then log in with `hf auth login`", key=key)
    if revision and "revision" in reason.lower():
        message = f"the Hub data set {path} has no revision {revision!r}"
        return Problem(message, "Give a branch, tag or commit that exists", key=f"{section.key}.revision")
    message = f"no file or folder {path} here, and no data set of that name on the Hub that you can read"
    return Problem(message, "Correct the name; a private data set needs `hf auth login`", key=key)
