"""The README.md of a merged model: where it comes from, how it proved itself, how to load it."""

import json

from tunebook.finished import Finished
from tunebook.places import is_local


def render_merged_card(finished: Finished, verification: str) -> str:
    """Return the card of a merged model, with the figures of its verification; no path of this machine is in it."""
    named = finished.recipe.model
    base = named.base_id or (None if is_local(named.name_or_path) else named.name_or_path)
    known = [f"base_model: {json.dumps(base)}"] if base else []
    metadata = "\n".join([*known, "library_name: transformers", "pipeline_tag: text-generation", "tags: [tunebook]"])
    steps = f" (the checkpoint after step {finished.checkpoint.step})" if finished.checkpoint else ""
    return f"""---
{metadata}
---

# {finished.recipe.stem}, merged

The adapter of the run `{finished.recipe.stem}`{steps}, merged into {base or "its base, which has no public name"}. It
loads without PEFT:

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("FOLDER")
tokenizer = AutoTokenizer.from_pretrained("FOLDER")
```

## How it was verified

{verification}
"""
