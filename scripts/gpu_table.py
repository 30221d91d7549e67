"""The results of ``gpu_bench.py`` as Markdown."""

from __future__ import annotations

from typing import Any

from pipeline.engine.bench import Measurement, compare

__all__ = ["table"]


def table(results: dict[str, Any]) -> str:
    """The figures as Markdown."""
    lines = []
    for model, batches in results.get("measured", {}).items():
        lines += [f"\n{model}, images/s without / with CUDA graph (P50 in ms with graph)\n"]
        names = list(dict.fromkeys(m["name"] for found in batches.values() for m in found))
        lines += ["| batch | " + " | ".join(names) + " |", "|---:|" + "---:|" * len(names)]
        for batch, found in _by_batch(batches):
            lines.append(f"| {batch} | " + " | ".join(_rates(found, name) for name in names) + " |")
    for model, fastest in results.get("fastest", {}).items():
        lines += _fastest(model, fastest)
    if results.get("accuracy"):
        lines += ["\n| model | engine | top-1 | onnxruntime, same graph | agreement |", "|---|---|---:|---:|---:|"]
        for model, variants in results["accuracy"].items():
            for name, f in variants.items():
                reference = (
                    f"{100 * f['top1_onnxruntime']:.2f} % | {100 * f['agreement']:.2f} %"
                    if "agreement" in f
                    else "- | -"
                )
                lines.append(f"| {model} | {name} | {100 * f['top1']:.2f} % | {reference} |")
    if results.get("overlap"):
        lines += [
            "\n| model | engine | batch | compute alone | one request at a time | overlapped | share | copies alone |",
            "|---|---|---:|---:|---:|---:|---:|---:|",
        ]
        for model, variants in results["overlap"].items():
            for name, f in variants.items():
                rates = " | ".join(f"{f[key]:,.0f}" for key in ("compute_alone", "one_at_a_time", "overlapped"))
                lines.append(
                    f"| {model} | {name} | {f['batch']} | {rates} | {f['share']:.1%} | {f['copy_in_alone']:,.0f} |"
                )
    if results.get("builds"):
        lines += [
            "\n| model | engine | build (timing cache before it) | again | plan "
            "| layers, int8 / float convolutions, reformats, pointwise: of each profile |",
            "|---|---|---:|---:|---:|---|",
        ]
        for model, variants in results["builds"].items():
            for name, builds in variants.items():
                first, second = builds.get("build", {}), builds.get("second_build", {})
                seconds = f"{first['build_seconds']:.1f} s ({first['timing_cache']})" if first else "-"
                again = f"{second['build_seconds']:.1f} s" if second else "-"
                counts = first.get("layers") or results.get("layer_counts", {}).get(model, {}).get(name) or {}
                plan = f"{first.get('plan_bytes', 0) / 1e6:.1f} MB"
                lines.append(f"| {model} | {name} | {seconds} | {again} | {plan} | {_counts(counts)} |")
    return "\n".join(lines) + "\n"


def _counts(counts: dict[str, Any]) -> str:
    parts = counts.get("per_profile") or ([counts] if counts else [])
    texts = (
        f"{c['layers']}, {c['convolutions_int8']} / {c['convolutions_float']}, {c['reformats']}, {c['pointwise']}"
        for c in parts
    )
    return "; ".join(texts) or "-"


def _by_batch(batches: dict[str, Any]) -> list[tuple[str, Any]]:
    return sorted(batches.items(), key=lambda item: int(item[0]))


def _rates(found: list[dict[str, Any]], name: str) -> str:
    """Images/s without / with graph (P50 in ms with graph) of one engine."""
    pair = {m["cuda_graph"]: m for m in found if m["name"] == name}
    rates = " / ".join(f"{pair[graph]['throughput']:,.0f}" if graph in pair else "-" for graph in (False, True))
    return rates + (f" ({pair[True]['p50_ms']:.3f})" if True in pair else "")


def _fastest(model: str, fastest: dict[str, Any]) -> list[str]:
    """What was chosen for each profile, and the runner that picks against both plans."""
    lines = [
        f"\n{model}, fastest: which plan serves which profile, by the medians of the rounds with CUDA graph\n",
        "| profile | int8 ms | fp16 ms | fp16 is | served by |",
        "|---|---:|---:|---|---|",
    ]
    for choice in fastest["choices"]["choices"]:
        times = " | ".join("-" if choice[key] is None else f"{choice[key]:.4f}" for key in ("int8_ms", "float_ms"))
        served = "fp16" if choice["chosen"] == "float" else "int8"
        lines.append(f"| {choice['profile']} | {times} | {choice['verdict']} | {served} |")
    lines += [
        f"\n{model}, fastest interleaved with both, images/s without / with CUDA graph (P50 in ms with graph)\n",
        "| batch | int8 | fp16 | fastest | runs | against int8 | against fp16 |",
        "|---:|---:|---:|---:|---|---|---|",
    ]
    for batch, found in _by_batch(fastest.get("batches", {})):
        with_graph = {m["name"]: Measurement.model_validate(m) for m in found if m["cuda_graph"]}
        ours = with_graph["fastest"]
        cells = [_rates(found, name) for name in ("int8", "fp16", "fastest")]
        cells += ["fp16" if ours.plan == "float" else "int8"]
        cells += [compare(ours, with_graph[name]) for name in ("int8", "fp16")]
        lines.append(f"| {batch} | " + " | ".join(cells) + " |")
    return lines
