"""What a run will do, derived before anything heavy is loaded: batches, memory, time, mistakes."""
