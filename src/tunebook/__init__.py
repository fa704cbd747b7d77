"""tunebook: fine-tuning recipes that keep their promises, and the one program that runs them."""

__version__ = "0.1.0"
