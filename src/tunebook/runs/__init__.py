"""Run folders: what a run depends on, its checkpoints, and past runs read, compared, shown and repeated."""
