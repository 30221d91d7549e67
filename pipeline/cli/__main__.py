"""`python -m pipeline.cli`: the same as the `quantize` command."""

from pipeline.cli import main

if __name__ == "__main__":
    main(prog_name="quantize")
