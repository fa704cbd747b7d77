# Every target installs what it needs into .venv; nothing outside this folder is touched.
PYTHON ?= python3
BIN := .venv/bin
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: install quickstart test test-slow torture bench bench-data bench-packing bench-loss bench-gpu bench-start \
	bench-scaling check format clean

install: .venv/installed

.venv/installed: setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "tunebook needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch .venv/installed

# Two processes, DDP over gloo, on any machine: cpu.yaml hides the GPUs.
quickstart: install
	$(BIN)/accelerate launch --config_file accelerate_configs/cpu.yaml --num_processes 2 \
		finetune.py recipes/tiny_qlora.yaml --fresh

test: install
	$(BIN)/python -m pytest -q

# What takes minutes: eight processes, two machines, and more of what is shown already.
test-slow: install
	$(BIN)/python -m pytest -q -rP -m long

# A hundred SIGKILLs at random instants; every run must end as the one that nobody killed. 6 to 10 minutes.
torture: install
	PYTHONPATH=tests $(BIN)/python tests/torture.py --kills 100

# The bench targets pass on what they are given: make bench-data ARGS="--rows ROWS.json --tokenizer FOLDER".

# Training speed beside other programs, which get environments of their own under benchmarks/.venvs.
# More than an hour; quiet machines only.
bench: install
	$(BIN)/python benchmarks/run_all.py $(ARGS)

# How fast rows become labelled tokens, against the bare tokenizer and TRL. About 20 minutes; quiet machines only.
bench-data: install
	$(BIN)/python benchmarks/data_speed.py $(ARGS)

# What packing is worth with sdpa. About 15 minutes; quiet machines only.
bench-packing: install
	$(BIN)/python benchmarks/packing_speed.py $(ARGS)

# Time and memory of the loss for a vocabulary of 152,064 tokens. About 20 minutes; needs 12 GB of memory.
bench-loss: install
	$(BIN)/python benchmarks/loss_memory.py $(ARGS)

# On a GPU, under 8 minutes; without one: benchmarks/gpu.py --tiny.
bench-gpu: install
	$(BIN)/python benchmarks/gpu.py $(ARGS)

# From launch to the first step, against the imports alone. About 3 minutes; quiet machines only.
bench-start: install
	$(BIN)/python benchmarks/start_time.py $(ARGS)

# What a second process is worth.
bench-scaling: install
	$(BIN)/python benchmarks/process_scaling.py $(ARGS)

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q -m "not slow"

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv build dist src/*.egg-info .pytest_cache .ruff_cache .mypy_cache
