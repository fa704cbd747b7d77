"""The model and its adapter: shapes, what LoRA reaches, loading and saving."""
