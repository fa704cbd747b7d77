"""`tunebook push`: a finished run on the Hub, checked whole, with its card made anew as an export's is."""

import shutil
import tempfile
from pathlib import Path

from tunebook.export.export import fill_card, name_base
from tunebook.export.finished import open_finished
from tunebook.hub.files import HubFile
from tunebook.hub.publishing import publish_by_hand


def push_by_hand(run_dir: str, repo: str | None, private: bool, revision: str | None, dry_run: bool) -> None:
    """Publish the finished run in a folder, as `publish_by_hand` does; raises Refused where it is damaged, too."""
    publish_by_hand(run_dir, repo, private, revision, dry_run, make_anew)


def make_anew(folder: Path) -> list[HubFile]:
    """Return what is pushed otherwise than it lies in the adapter folder: the card, and the name of the base.

    Both follow what the recipe in the run folder says now. Raises Refused where the adapter is not what was trained.
    """
    finished = open_finished(str(folder))
    adapter = finished.whole_adapter
    with tempfile.TemporaryDirectory(prefix="tunebook-") as place:
        made = Path(place)
        if (settings := adapter / "adapter_config.json").is_file():
            shutil.copyfile(settings, made / settings.name)
        name_base(finished, made)
        fill_card(finished, made)
        return [HubFile(path.name, path.read_bytes()) for path in sorted(made.iterdir())]
