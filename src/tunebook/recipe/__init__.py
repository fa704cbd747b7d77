"""The recipe: what its author wrote, read strictly."""
