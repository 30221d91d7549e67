#!/usr/bin/env python3
"""Accuracy of the INT8 graphs against FP32, in onnxruntime, on real input.

    accuracy.py imagenet --images FOLDER     EfficientNet-Lite0: top-1 (FOLDER: labels.csv with file, class_index)
    accuracy.py resnet50 --images FOLDER     ResNet-50 with random weights: agreement with FP32 (16 images calibrate)
    accuracy.py minilm                       all-MiniLM-L6-v2: cosine of sentence embeddings, 200 sentences
    accuracy.py ocr                          PP-OCRv4 detector and recogniser of rapidocr: text of rendered pages

Options: --calibrator NAME (repeatable), --rules-off NAME, --exclude ENTRY, --equalise; for the first two also
--modelopt-python PATH (an interpreter that can import modelopt): ModelOpt's and onnxruntime's graphs as well, entropy,
calibrated on the same images. 128 samples (8 pages) calibrate, others test. INT8 graphs run with graph optimisation
off. Sentences are those of Python's own language reference.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pipeline.config import PlacementConfig
from pipeline.core.ort import make_session
from pipeline.data.batching import Batch
from pipeline.placement.ops import WEIGHTED
from scripts.rivals import evenly
from tests.zoo import build, trained

Feeds = dict[str, np.ndarray]
BATCH = 8
CALIBRATION = 128
SENTENCES = 200
CALIBRATION_PAGES = 8
TEST_PAGES = 8
SCALES = (1, 2)
"""Pages of 640x480 and of 1280x960: the calibration takes turns, the tests are apart."""


@dataclass(frozen=True)
class Options:
    """What the command line asks for."""

    calibrators: tuple[str, ...]
    config: PlacementConfig
    equalise: bool
    scratch: Path
    modelopt_python: str | None = None
    """Interpreter for ModelOpt; None: no graphs of other tools."""


class Model:
    """A prepared float model, calibrated once."""

    def __init__(self, source: Path, feeds: Iterable[Feeds], options: Options, folder: Path) -> None:
        from calibrators.statistics import load_statistics
        from pipeline import calibrate, export, prepare
        from pipeline.placement import equalise, make_plan

        self.folder, self.config = folder, options.config
        exported = export.run(str(source), inputs=(), profiles=(), opset=17, folder=folder / "export").model_path
        self.fp32 = prepare.run(exported, folder=folder / "prepare").model_path
        batches = [Batch(index, (index,), feed) for index, feed in enumerate(feeds)]
        if options.equalise:
            result = equalise.run(self.fp32, batches, folder=folder / "equalise", config=self.config)
            before, after = (
                np.array([getattr(tensor, name) for tensor in result.tensors])
                for name in ("spread_before", "spread_after")
            )
            print(
                f"{len(result.tensors)} tensors equalised; greatest channel over median channel: median "
                f"{np.median(before):.1f} before, {np.median(after):.1f} after, greatest {before.max():.1f} before, "
                f"{after.max():.1f} after"
            )
            self.fp32 = result.model_path
        self.plan = make_plan(self.fp32, self.config)
        calibrated = calibrate.run(self.fp32, self.plan.tensors, batches, folder=folder / "calibrate")
        self.statistics, _ = load_statistics(calibrated.statistics_path)
        ops: dict[str, list[bool]] = {}
        for decision in self.plan.decisions:
            if decision.op in WEIGHTED:
                ops.setdefault(decision.op, []).append(decision.quantized)
        print("INT8 nodes: " + ", ".join(f"{sum(found)} of {len(found)} {op}" for op, found in ops.items()), flush=True)

    def int8(self, calibrator: str) -> Path:
        import calibrators
        from pipeline import quantize

        result = quantize.run(
            self.fp32,
            self.plan,
            self.statistics,
            calibrators.get(calibrator),
            folder=self.folder / calibrator,
            config=self.config,
        )
        return result.model_path


# --- EfficientNet-Lite0, ResNet-50


def imagenet(name: str, images: Path, options: Options) -> None:
    from scripts.rivals import load_images, make_network, normalised

    trained_weights = name == "efficientnet-lite0"
    pixels, labels = load_images(images)
    rows = evenly(len(pixels), CALIBRATION)
    test = np.setdiff1d(np.arange(len(pixels)), rows)
    if not trained_weights:
        rows = rows[evenly(len(rows), 2 * BATCH)]

    def feeds(which: np.ndarray) -> Iterator[Feeds]:
        for start in range(0, len(which), BATCH):
            yield {"x": normalised(pixels[which[start : start + BATCH]])}

    def logits(path: Path, *, optimise: bool) -> np.ndarray:
        session = make_session(path, optimise=optimise)
        return np.concatenate([session.run(None, feed)[0] for feed in feeds(test)])

    network = make_network(name, normalised(pixels[rows]), options.scratch)
    model = Model(network.exported, feeds(rows), options, options.scratch / "ours")
    graphs = [(calibrator, model.int8(calibrator)) for calibrator in options.calibrators]
    if options.modelopt_python is not None:
        others = {tool: options.scratch / tool for tool in ("modelopt", "onnxruntime")}
        for folder in others.values():
            folder.mkdir()
        graphs.append(("ModelOpt", network.modelopt(others["modelopt"], options.modelopt_python, "entropy")))
        graphs.append(("onnxruntime", network.onnxruntime(others["onnxruntime"])))
    reference = logits(model.fp32, optimise=True)
    top1 = 100.0 * float((reference.argmax(1) == labels[test]).mean())
    of_fp32 = f"top-1 {top1:.2f}" if trained_weights else "random weights"
    print(f"fp32: {of_fp32}, {len(test)} images to test, {len(rows)} to calibrate", flush=True)
    for title, path in graphs:
        found = logits(path, optimise=False)
        hits = 100.0 * float((found.argmax(1) == labels[test]).mean())
        agree = 100.0 * float((found.argmax(1) == reference.argmax(1)).mean())
        error = float(np.linalg.norm(found - reference) / np.linalg.norm(reference))
        known = f"top-1 {hits:.2f} ({hits - top1:+.2f}), " if trained_weights else ""
        print(f"{title}: {known}agrees with fp32 on {agree:.2f} %, relative L2 {error:.4f}", flush=True)


# --- MiniLM-L6


def sentences() -> list[str]:
    """Plain English sentences of 6 to 40 words from the language reference inside Python."""
    from pydoc_data.topics import topics

    found: dict[str, None] = {}
    for key in sorted(topics):
        for paragraph in re.split(r"\n\s*\n", topics[key]):
            text = re.sub(r"[*`\"]", "", paragraph)
            if text.startswith((" ", "\t")) or re.search(r"[=|{}<>~^_\[\]]|\.\.\.|::", text):
                continue
            for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z])", " ".join(text.split())):
                if 6 <= len(sentence.split()) <= 40 and sentence[0].isupper() and sentence[-1] in ".!?":
                    found[sentence] = None
    return list(found)


def minilm(options: Options) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(trained.minilm_tokenizer()))
    tokenizer.enable_padding()
    texts = sentences()
    rows = evenly(len(texts), CALIBRATION + SENTENCES)
    calibration = rows[evenly(len(rows), CALIBRATION)]
    test = np.setdiff1d(rows, calibration)

    def feeds(which: np.ndarray) -> Iterator[Feeds]:
        for start in range(0, len(which), BATCH):
            encoded = tokenizer.encode_batch([texts[index] for index in which[start : start + BATCH]])
            yield {
                "input_ids": np.array([item.ids for item in encoded]),
                "attention_mask": np.array([item.attention_mask for item in encoded]),
            }

    def embeddings(path: Path, *, optimise: bool) -> np.ndarray:
        session = make_session(path, optimise=optimise)
        return np.concatenate([session.run(None, feed)[0] for feed in feeds(test)])

    model = Model(build("minilm", options.scratch).path, feeds(calibration), options, options.scratch)
    reference = embeddings(model.fp32, optimise=True)
    for name in options.calibrators:
        cosine = (embeddings(model.int8(name), optimise=False) * reference).sum(1)
        print(
            f"{name}: cosine mean {cosine.mean():.4f}, 1 % quantile {np.quantile(cosine, 0.01):.4f}, least "
            f"{cosine.min():.4f} over {len(test)} sentences, "
            f"{100.0 * (cosine >= 0.99).mean():.1f} % of them at least 0.99",
            flush=True,
        )


# --- OCR


def page(number: int, texts: Sequence[str], scale: int) -> tuple[np.ndarray, str]:
    """uint8 (480 scale, 640 scale, 3): sentences in one of five faces of 18 to 29 pixels times scale, dark on light
    grey; and the lines that it shows."""
    import matplotlib
    from PIL import Image, ImageDraw, ImageFont

    faces = ("DejaVuSans", "DejaVuSerif", "DejaVuSansMono", "DejaVuSans-Bold", "DejaVuSerif-Italic")
    random = np.random.default_rng(number)
    width, height, margin, size = 640 * scale, 480 * scale, 30 * scale, int(random.integers(18, 30)) * scale
    font = ImageFont.truetype(
        str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"{faces[number % 5]}.ttf"), size
    )
    light, dark = int(random.integers(225, 256)), int(random.integers(0, 70))
    image = Image.new("RGB", (width, height), (light, light, light))
    draw = ImageDraw.Draw(image)
    words = " ".join(texts[(number * 37 + index) % len(texts)] for index in range(20)).split()
    line, top, lines = "", margin, []
    for word in words:
        if line and draw.textlength(f"{line} {word}", font=font) > width - 2 * margin:
            draw.text((margin, top), line, font=font, fill=(dark, dark, dark))
            lines.append(line)
            line, top = "", top + int(size * 1.5)
            if top > height - 2 * size:
                break
        line = f"{line} {word}".strip()
    return np.asarray(image), "\n".join(lines)


def distance(a: str, b: str) -> int:
    """Levenshtein distance."""
    previous = list(range(len(b) + 1))
    for i, left in enumerate(a, 1):
        current = [i]
        for j, right in enumerate(b, 1):
            current.append(min(previous[j] + 1, current[-1] + 1, previous[j - 1] + (left != right)))
        previous = current
    return previous[-1]


def unchanged(reference: Sequence[str], found: Sequence[str]) -> float:
    """Per cent of the reference's characters that an edit script leaves alone."""
    edits = sum(distance(a, b) for a, b in zip(reference, found, strict=True))
    return 100.0 * (1.0 - edits / sum(map(len, reference)))


def agreement(reference: Sequence[str], found: Sequence[str]) -> str:
    """:func:`unchanged` of all characters, and of those that are no white space."""
    dense = [["".join(text.split()) for text in texts] for texts in (reference, found)]
    return f"{unchanged(reference, found):.2f} % ({unchanged(*dense):.2f} % without white space)"


class Recording:
    """Stands in for rapidocr's session: our graph, and with ``keep`` what it was fed."""

    def __init__(self, path: Path, *, optimise: bool, keep: bool = False) -> None:
        self.session = make_session(path, optimise=optimise)
        self.keep = keep
        self.feeds: list[Feeds] = []

    def run(self, outputs: Any, feeds: Feeds) -> Any:
        if self.keep:
            self.feeds.append({name: np.array(value) for name, value in feeds.items()})
        return self.session.run(outputs, feeds)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.session, name)


def compare(
    read: Callable[[Sequence[np.ndarray]], list[str]],
    printed: Sequence[str],
    reference: Sequence[str],
    title: str,
    images: Sequence[np.ndarray],
) -> None:
    """Read ``images`` and print how much of the text is that of FP32, and what is printed on the pages."""
    found = read(images)
    print(f"  {title}: {agreement(reference, found)} as in fp32, {agreement(printed, found)} as printed", flush=True)


def ocr(options: Options) -> None:
    import logging

    from rapidocr_onnxruntime import RapidOCR

    logging.disable(logging.WARNING)
    engine = RapidOCR()
    places = {"detector": engine.text_det.infer, "recogniser": engine.text_rec.session}
    sources = {"detector": trained.ocr_detector(), "recogniser": trained.ocr_recogniser()}
    texts = sentences()

    def read(pages: Sequence[np.ndarray]) -> list[str]:
        return ["\n".join(item[1] for item in engine(image, use_cls=False)[0] or []) for image in pages]

    recordings = {name: Recording(source, optimise=True, keep=True) for name, source in sources.items()}
    for name, place in places.items():
        place.session = recordings[name]
    read([page(number, texts, SCALES[number % len(SCALES)])[0] for number in range(CALIBRATION_PAGES)])
    models = {
        name: Model(source, recordings[name].feeds, options, options.scratch / name) for name, source in sources.items()
    }
    floats = {name: Recording(model.fp32, optimise=True) for name, model in models.items()}
    variants: list[tuple[str, dict[str, Recording]]] = []
    for calibrator in options.calibrators:
        int8 = {name: Recording(model.int8(calibrator), optimise=False) for name, model in models.items()}
        variants += [(f"{calibrator}, both INT8", int8)]
        variants += [(f"{calibrator}, {name} INT8", floats | {name: int8[name]}) for name in models]
    for scale in SCALES:
        pages, printed = zip(*(page(100 + number, texts, scale) for number in range(TEST_PAGES)), strict=True)
        for name, place in places.items():
            place.session = floats[name]
        reference = read(pages)
        report = partial(compare, read, printed, reference)
        count = sum(map(len, reference))
        print(
            f"{len(pages)} pages of {640 * scale}x{480 * scale}, {count} characters; fp32: "
            f"{agreement(printed, reference)} as printed",
            flush=True,
        )
        random = np.random.default_rng(0)
        noisy = [np.clip(image + random.integers(-2, 3, image.shape), 0, 255).astype(np.uint8) for image in pages]
        report("fp32, pages moved right by one pixel", [np.roll(image, 1, axis=1) for image in pages])
        report("fp32, noise of at most 2 grey levels of 255", noisy)
        for title, sessions in variants:
            for name, place in places.items():
                place.session = sessions[name]
            report(title, pages)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=("imagenet", "resnet50", "minilm", "ocr"))
    parser.add_argument("--images", type=Path)
    parser.add_argument("--calibrator", action="append")
    parser.add_argument("--rules-off", action="append", default=[])
    parser.add_argument("--exclude", action="append", default=[])
    parser.add_argument("--equalise", action="store_true")
    parser.add_argument("--modelopt-python")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        options = Options(
            calibrators=tuple(arguments.calibrator or ("entropy", "minmax", "percentile", "mse")),
            config=PlacementConfig(rules_off=tuple(arguments.rules_off), exclude=tuple(arguments.exclude)),
            equalise=arguments.equalise,
            modelopt_python=arguments.modelopt_python,
            scratch=Path(folder),
        )
        if arguments.task in ("imagenet", "resnet50"):
            if arguments.images is None:
                parser.error(f"{arguments.task} needs --images FOLDER")
            imagenet("efficientnet-lite0" if arguments.task == "imagenet" else "resnet50", arguments.images, options)
        else:
            {"minilm": minilm, "ocr": ocr}[arguments.task](options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
