"""`tunebook eval` as the ranks of a launch run it, for the fork server: the run folder in the place of a recipe."""

import os

from tunebook.using.evaluate import Evaluation, measure_as_rank


def eval_story(command):
    """Measure the run with the data, and the file to write, that the environment names."""
    wanted = Evaluation(data=os.environ.get("EVAL_DATA"), out=os.environ["EVAL_OUT"])
    measure_as_rank(command.recipe, wanted)
