"""Finding a run that came to its end."""

import json

import pytest

from tunebook.errors import Refused
from tunebook.finished import open_finished


def test_a_folder_without_a_finished_run_is_refused(tmp_path):
    with pytest.raises(Refused, match=r"no run_summary\.json"):
        open_finished(str(tmp_path))
    (tmp_path / "run_summary.json").write_text(json.dumps({"status": "failed"}))
    with pytest.raises(Refused, match="failed"):
        open_finished(str(tmp_path))
    (tmp_path / "run_summary.json").write_text(json.dumps({"status": "completed"}))
    with pytest.raises(Refused, match="0 recipes"):
        open_finished(str(tmp_path))
