"""`make demo`: EfficientNet-Lite0 with trained weights, from PyTorch to a TensorRT-RTX engine and an error heatmap.

Calibrates on crops of the photographs that the scikit-image package carries, so it needs no data of its own.

    python scripts/demo.py [--out artifacts/efficientnet-lite0]
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parents[1]
PHOTOGRAPHS = (
    "astronaut.png",
    "chelsea.png",
    "coffee.png",
    "hubble_deep_field.jpg",
    "ihc.png",
    "motorcycle_left.png",
    "retina.jpg",
    "rocket.jpg",
)
CROP = 224
ROWS, COLUMNS = 4, 6
SCALES = (1.0, 0.6)


def write_crops(folder: Path) -> int:
    """Cut every photograph, at two sizes, into a grid of overlapping 224x224 crops; returns how many there are."""
    import skimage
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    count = 0
    for name in PHOTOGRAPHS:
        with Image.open(Path(skimage.__file__).parent / "data" / name) as opened:
            photograph = opened.convert("RGB")
        for scale in SCALES:
            ratio = max(scale, CROP / min(photograph.size))
            image = photograph.resize((round(photograph.width * ratio), round(photograph.height * ratio)))
            for row in range(ROWS):
                for column in range(COLUMNS):
                    left = (image.width - CROP) * column // (COLUMNS - 1)
                    top = (image.height - CROP) * row // (ROWS - 1)
                    image.crop((left, top, left + CROP, top + CROP)).save(
                        folder / f"{Path(name).stem}-{scale}-{row}{column}.png"
                    )
                    count += 1
    return count


@click.command()
@click.option(
    "--out", type=click.Path(path_type=Path), default=ROOT / "artifacts" / "efficientnet-lite0", show_default=True
)
def main(out: Path) -> None:
    """Build the demonstration artifact and say where to look."""
    crops = out.parent / "demo-photographs"
    click.echo(f"{write_crops(crops)} crops of the scikit-image photographs in {crops}", err=True)
    command = [
        str(Path(sys.executable).with_name("quantize")), "build",
        f"{ROOT / 'scripts' / 'models.py'}:efficientnet_lite0",
        "--data", str(crops), "--preprocess", "efficientnet-lite", "--samples", "128",
        "--profile", "x=1x3x224x224,8x3x224x224,64x3x224x224", "--target", "rtx", "--out", str(out),
    ]  # fmt: skip
    click.echo("$ " + " ".join(f'"{part}"' if "," in part else part for part in command), err=True)
    if status := subprocess.run(command, check=False).returncode:
        raise SystemExit(status)
    click.echo(f"engine:  {out / 'engines' / 'rtx' / 'model.plan'}")
    click.echo(f"report:  {out / 'reports' / 'summary.md'}")
    click.echo(f"more:    quantize inspect {out}")


if __name__ == "__main__":
    main()
