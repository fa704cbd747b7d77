"""The hub section: what is refused while the recipe is read, and what it leaves alone."""

import pytest
from ruamel.yaml import YAML

from tunebook.errors import Refused
from tunebook.launching.world import world_of
from tunebook.plan.plan import build_plan
from tunebook.recipe.copying import render_copy
from tunebook.recipe.hand_loop import check_hand_loop
from tunebook.recipe.hub_checks import explain_branch, explain_repo
from tunebook.recipe.reading import load_recipe, write_resolved
from tunebook.runs.identity import recipe_identity

BASE = """model:
  name_or_path: some/model
lora: {}
data:
  path: some/rows
training:
  global_batch_size: 8
"""


@pytest.fixture
def load(tmp_path):
    def load_text(text, *overrides):
        (tmp_path / "mine.yaml").write_text(text)
        return load_recipe(str(tmp_path / "mine.yaml"), overrides)

    return load_text


def refusal(load, text, *overrides):
    with pytest.raises(Refused) as refused:
        load(text, *overrides)
    return str(refused.value)


def test_the_section_is_read_noted_and_written_back(load, tmp_path):
    assert load(BASE).hub is None
    recipe = load(BASE + "hub:\n  repo: me/run\n  private: true\n  revision: v1\n")
    assert (recipe.hub.repo, recipe.hub.private, recipe.hub.revision) == ("me/run", True, "v1")
    assert "the run is published as me/run when it has ended" in recipe.notes
    write_resolved(recipe, tmp_path / "again.yaml")
    assert load_recipe(str(tmp_path / "again.yaml")).hub == recipe.hub
    assert load(BASE + "hub: {repo: me/run}\n", "hub=null").hub is None
    assert load(BASE, "hub.repo=me/run").hub.repo == "me/run"


@pytest.mark.parametrize(
    "name",
    ["run", "me/", "/run", "me/run/x", "me/-run", "me/run.", "me/a--b", "me/a..b", "me/a b", "me/run.git", "./run",
     "me/ünicode", "https://huggingface.co/me/run", f"me/{'x' * 94}"],
)  # fmt: skip
def test_what_the_hub_would_not_call_a_repository_is_refused(load, name):
    assert "hub.repo" in refusal(load, BASE, f"hub.repo={name}")


@pytest.mark.parametrize("name", ["me/run", "me/Run_1.5-b", "0x/y", "me/_a"])
def test_a_name_of_the_hub_is_taken(name):
    assert explain_repo(name) == ""


@pytest.mark.parametrize(
    "name", ["a..b", "-a", "a/", "/a", "a//b", "a b", "a.lock", "refs/heads/x", "a^", "0" * 40, ".a"]
)
def test_what_is_no_branch_is_refused(load, name):
    assert "hub.revision" in refusal(load, BASE, "hub.repo=me/run", f"hub.revision='{name}'")
    assert explain_branch("v1.0/next") == ""


def test_a_section_without_a_repository_is_refused(load):
    assert "hub.repo: is missing" in refusal(load, BASE + "hub: {private: true}\n")
    assert "hub: the section is empty" in refusal(load, BASE + "hub:\n")


# X03
def test_a_base_that_nobody_else_finds_is_refused_before_training(load, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text("{}")
    for name in (str(tmp_path / "tiny"), "tiny", "./tiny"):
        text = BASE.replace("some/model", name)
        assert "model.base_id: the run is to be published" in refusal(load, text, "hub.repo=me/out")
        assert load(text, "hub.repo=me/out", "model.base_id=org/tiny").hub is not None
        assert load(text).hub is None
        for wrong in ("/tmp/x/tiny", "./tiny", "org/tiny/x"):
            assert "model.base_id" in refusal(load, text, "hub.repo=me/out", f"model.base_id={wrong}")


def test_names_of_transformers_lead_to_the_section(load):
    for name, key in (("push_to_hub: true", "hub: {repo"), ("hub_model_id: me/x", "hub: {repo"),
                      ("hub_private_repo: true", "hub.private"), ("hub_revision: x", "hub.revision")):  # fmt: skip
        assert key in refusal(load, BASE + f"  {name}\n")
        assert key in refusal(load, BASE + f"{name}\n")


def test_publishing_changes_no_result_of_a_run(load):
    plain, published = load(BASE), load(BASE + "hub: {repo: me/run, private: true}\n")
    plans = [build_plan(recipe, world_of(1, "cpu")) for recipe in (plain, published)]
    assert recipe_identity(plain, plans[0]) == recipe_identity(published, plans[1])


def test_the_loop_written_by_hand_publishes_nothing(load):
    with pytest.raises(Refused, match="hub=null"):
        check_hand_loop(load(BASE, "hub.repo=me/run"))


@pytest.mark.parametrize(
    "text",
    [
        BASE + "hub: {repo: me/run}\n",
        BASE + "hub:   # where it goes\n  repo: me/run\n  private: true\n\n# the end\n",
        "hub:\n  repo: me/run\n\n# what is trained\n" + BASE,
        "{model: {name_or_path: some/model}, hub: {repo: me/run}, data: {path: some/rows}}",
    ],
)
def test_a_copy_for_another_model_goes_to_no_repository(text):
    copied = render_copy(text, "a/b", "# mine")
    read = YAML(typ="safe", pure=True).load(copied)
    assert not read.get("hub") and read["model"]["name_or_path"] == "a/b" and read["data"] == {"path": "some/rows"}
    for comment in ("# the end", "# what is trained"):
        assert (comment in copied) == (comment in text)
