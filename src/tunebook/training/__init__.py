"""Training: from an accepted recipe and prepared data to a trained model."""

import tunebook.system.quiet  # noqa: F401  first, since the imports that follow are what it keeps quiet
