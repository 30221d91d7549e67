"""`quantize histogram`: a tensor's distribution with every calibrator's threshold, as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from pipeline.cli.common import JsonCommand, output_options, print_json, user_errors

_MOST = 24


@click.command(cls=JsonCommand)
@click.argument("artifact", type=click.Path(path_type=Path))
@click.argument("tensors", nargs=-1, required=True, metavar="TENSOR...")
@click.option("-o", "--out", type=click.Path(path_type=Path), default=Path("histogram.png"), show_default=True)
@click.option(
    "--calibrator", "calibrators", multiple=True, help="Mark only these (repeatable) [all, and the artifact's own]."
)
@output_options
@user_errors
def command(
    artifact: Path,
    tensors: tuple[str, ...],
    out: Path,
    calibrators: tuple[str, ...],
    as_json: bool,
    quiet: bool,
    verbose: bool,
) -> None:
    """Draw the distribution of |x| of each TENSOR (names or shell patterns), on a logarithmic scale.

    ARTIFACT is an artifact folder or a calibration.npz.
    """
    import calibrators as known
    from pipeline.cli.places import check_out_file
    from pipeline.core.errors import InputError
    from pipeline.reports.histogram import draw, select, thresholds

    check_out_file(out, inputs=[artifact])
    if out.suffix.lower() not in ("", ".png"):
        raise InputError(
            f"cannot write {out}: the picture is a PNG, and its name says {out.suffix}",
            remedy=f"name it {out.with_suffix('.png')}",
        )
    path, own = _statistics_of(artifact)
    statistics, _ = known.load_statistics(path)
    chosen = select(statistics, tensors)
    if len(chosen) > _MOST:
        raise InputError(
            f"{len(chosen)} tensors match, one picture holds {_MOST}",
            remedy="give narrower patterns, or several pictures",
        )
    marked = [known.get(name) for name in calibrators or known.names()]
    if own is not None and not calibrators:
        marked = [own if own.name == each.name else each for each in marked]
    ranges = {name: thresholds(statistics[name], marked) for name in chosen}
    draw({name: statistics[name] for name in chosen}, ranges, out)
    if as_json:
        print_json({"file": str(out), "amax": {name: dict(found) for name, found in ranges.items()}})
    elif not quiet:
        click.echo(f"{out}: {len(chosen)} tensor{'s' * (len(chosen) != 1)}")


def _statistics_of(artifact: Path) -> tuple[Path, Any]:
    """The calibration file, and the artifact's own calibrator (None for a bare file)."""
    if not artifact.is_dir():
        return artifact, None
    import calibrators
    from pipeline.artifact import CALIBRATION, Artifact

    opened = Artifact.open(artifact)
    record = opened.manifest.calibration
    return opened.path(CALIBRATION), calibrators.get(record.calibrator, record.params)
