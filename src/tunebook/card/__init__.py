"""The model card of what came out of a run."""
