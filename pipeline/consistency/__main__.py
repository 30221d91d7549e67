"""``torchrun --nproc-per-node N -m pipeline.consistency MODEL --data DATA``."""

from pipeline.cli.consistency import command

if __name__ == "__main__":
    command(prog_name="quantize consistency")
