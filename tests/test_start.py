"""The command's start."""

import sys

import pytest

from tunebook.commands.start import main


class Interrupting:
    """Ctrl-C in the middle of an import."""

    def find_spec(self, name, path=None, target=None):
        if name == "tunebook.commands.cli":
            raise KeyboardInterrupt


@pytest.mark.parametrize("is_imported", [False, True])
def test_ctrl_c_at_any_time_is_the_exit_code_that_shells_have(monkeypatch, is_imported):
    import tunebook.commands.cli

    def interrupted():
        raise KeyboardInterrupt

    if is_imported:
        monkeypatch.setattr(tunebook.commands.cli, "main", interrupted)
    else:
        monkeypatch.delitem(sys.modules, "tunebook.commands.cli")
        monkeypatch.setattr(sys, "meta_path", [Interrupting(), *sys.meta_path])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130
