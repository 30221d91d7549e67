"""A whole experiment in less than a minute: the handwritten digits of scikit-learn, and a small network trained here.

    python scripts/experiments/digits.py [--out artifacts/digits-compare] [--workers N]

1,000 of the 1,797 digits train the network; of the others 128 calibrate and 669 are held aside to compare on, with
their real labels. Every calibrator is measured without shift, with noise on the activations and with changed images.
"""

from __future__ import annotations

from pathlib import Path

import click
import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
WEIGHTS = "digits.pt"
TRAINED_ON = 1000


class Digits(torch.nn.Module):
    """Four convolutions with ReLU and BatchNorm, then a linear layer; input Nx1x8x8 in 0..1, 10 classes."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[torch.nn.Module] = []
        for inputs, outputs, stride in ((1, 16, 1), (16, 32, 1), (32, 32, 2), (32, 64, 2)):
            layers += [
                torch.nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False),
                torch.nn.BatchNorm2d(outputs),
                torch.nn.ReLU(),
            ]
        self.features = torch.nn.Sequential(*layers)
        self.classifier = torch.nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(x).mean(dim=(2, 3)))


def load() -> tuple[np.ndarray, np.ndarray]:
    """Images float32 (1797, 1, 8, 8) in 0..1, and their classes."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    return (digits.images[:, None] / 16.0).astype(np.float32), digits.target.astype(np.int64)


def trained(images: np.ndarray, labels: np.ndarray, epochs: int = 12) -> Digits:
    """The network after a few seconds on one core, the same on every run."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Digits()
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3, weight_decay=1e-4)
    x, y = torch.from_numpy(images), torch.from_numpy(labels)
    for epoch in range(epochs):
        for rows in torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch)).split(50):
            optimiser.zero_grad()
            torch.nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimiser.step()
    return model.eval()


def prepare(folder: Path) -> tuple[Path, Path, Path]:
    """Train; write what the experiment reads: the ONNX model, the images not trained on, and their labels."""
    images, labels = load()
    folder.mkdir(parents=True, exist_ok=True)
    model = trained(images[:TRAINED_ON], labels[:TRAINED_ON])
    paths = folder / "digits.onnx", folder / "digits.npy", folder / "labels.csv"
    torch.onnx.export(
        model,
        (torch.zeros(2, 1, 8, 8),),
        str(paths[0]),
        input_names=["image"],
        output_names=["scores"],
        dynamic_shapes=({0: torch.export.Dim("N")},),
        opset_version=18,
        dynamo=True,
        verbose=False,
    )
    np.save(paths[1], images[TRAINED_ON:])
    lines = [f"{index},{label}" for index, label in enumerate(labels[TRAINED_ON:])]
    paths[2].write_text("\n".join(["index,class_index", *lines]) + "\n")
    return paths


@click.command()
@click.option(
    "--out", type=click.Path(path_type=Path), default=ROOT / "artifacts" / "digits-compare", show_default=True
)
@click.option("--workers", type=int)
def main(out: Path, workers: int | None) -> None:
    from pipeline.cli.common import make_progress
    from pipeline.cli.compare import print_outcome
    from pipeline.compare.config import CompareConfig
    from pipeline.compare.experiment import run_experiment

    model, data, labels = prepare(out / "input")
    config = CompareConfig(
        model=str(model),
        data=str(data),
        labels=labels,
        out=out,
        samples=128,
        shift_sigma=(0.0, 0.05, 0.1, 0.2, 0.4),
        shift_images=("brightness", "contrast", "blur", "noise"),
        workers=workers,
    )
    print_outcome(run_experiment(config, progress=make_progress(quiet=False)), config)


if __name__ == "__main__":
    main()
