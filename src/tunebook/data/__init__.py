"""From rows to labelled tokens: reading, checking, prompting, tokenising and caching."""

import tunebook.system.quiet  # noqa: F401  models and data come from the Hub, whose silence is told in one line
