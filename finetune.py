"""The story of a run: accelerate launch --num_processes 4 finetune.py recipes/qwen7b_qlora.yaml"""

from tunebook.launching.command_line import Command
from tunebook.launching.entry import run_rank
from tunebook.launching.world import read_world
from tunebook.plan.planning import plan_with_data, plan_without_data, show_plan, show_start
from tunebook.recipe.reading import load_recipe, placed_in
from tunebook.recipe.schema import Recipe
from tunebook.runs.folder import check_folder, hold_run_folder


def finetune(command: Command) -> None:
    """Run one rank: whatever can be refused is refused before the process group exists and weights load."""
    recipe = load_recipe(command.recipe, command.overrides)
    with placed_in(recipe):
        show_plan(recipe, command) if command.plan else train_recipe(recipe, command)


def train_recipe(recipe: Recipe, command: Command) -> None:
    """Train an accepted recipe in the world that the launcher made."""
    world = read_world(compute_dtype=recipe.model.dtype, ddp_backend=recipe.arguments.get("ddp_backend"))
    plan = plan_without_data(recipe, world, command.run_dir)
    check_folder(plan, recipe, command.fresh)
    show_start(plan, world)

    # torch, transformers, peft and datasets take seconds to import; only an accepted recipe pays for them.
    from tunebook.data.prepare import prepare_data
    from tunebook.data.tokenizer import tokenizer_of
    from tunebook.hub.publishing import check_publishing, publish_finished
    from tunebook.launching.process_group import process_group
    from tunebook.training.ending import is_finished, show_result
    from tunebook.training.ready import build_run
    from tunebook.training.run import train
    from tunebook.training.starting import find_start

    tokenizer = tokenizer_of(recipe)
    data = prepare_data(recipe, tokenizer)
    plan = plan_with_data(plan, data, world)
    with process_group(world, recipe.ddp_timeout):
        check_publishing(recipe, world)
        if not is_finished(recipe, plan, world, tokenizer, data, command.fresh):
            start = find_start(recipe, plan, world, tokenizer, data, command.fresh)
            run = build_run(recipe, plan, world, tokenizer, data, start.keep)
            with hold_run_folder(run.plan, recipe, world, start.identity, start.keep):
                show_result(train(run, start.checkpoint), plan, world)
    publish_finished(recipe, plan, world)


if __name__ == "__main__":
    run_rank(finetune)
