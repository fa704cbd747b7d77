"""From rows to labelled tokens: reading, checking, prompting, tokenising and caching."""
