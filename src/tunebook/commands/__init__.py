"""The `tunebook` command."""
