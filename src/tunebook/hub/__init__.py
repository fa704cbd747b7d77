"""The Hugging Face Hub: a client whose waits end, what of a run goes there, and publishing it."""
