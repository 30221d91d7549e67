"""`quantize coverage`: do the profiles fit the requests?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.cli.common import JsonCommand, console, output_options, print_json, user_errors
from pipeline.cli.tables import add_row, new_table, print_table

if TYPE_CHECKING:
    from rich.table import Table

    from pipeline.engine.coverage import Coverage

_SHOWN = 10


@click.command(cls=JsonCommand)
@click.argument("artifact", type=click.Path(path_type=Path))
@click.argument("requests", type=click.Path(path_type=Path))
@click.option("--profiles", "count", type=click.IntRange(1), help="Profiles to suggest [as many as there are].")
@output_options
@user_errors
def command(artifact: Path, requests: Path, count: int | None, as_json: bool, quiet: bool, verbose: bool) -> None:
    """Say which share of REQUESTS each profile of ARTIFACT covers, and which profiles would fit better.

    REQUESTS is a CSV file with a column of shapes (8x3x224x224) for each input, and an optional column count. Each
    request goes to the profile whose optimum is nearest; the distance is the sum over its dimensions of
    |log2(dimension / optimum)|: 0 is what the engine was tuned for, 1 is twice or half of it in one dimension.
    """
    from pipeline.artifact import Artifact
    from pipeline.config import Profile
    from pipeline.core.errors import InputError
    from pipeline.engine.coverage import coverage, impossible, read_requests, suggest

    manifest = Artifact.open(artifact).manifest
    found = read_requests(requests, [spec.name for spec in manifest.inputs])
    profiles = tuple(Profile.parse(text) for text in manifest.profiles)
    never = impossible(manifest.inputs, found)
    possible = {request: number for request, number in found.items() if request not in never}
    if not possible:
        first = next(iter(never.values()))
        raise InputError(
            f"{requests}: the model takes none of these requests, such as {first.shapes}: {first.reason}",
            remedy="are they of another model, or its shapes in another order?",
        )
    now = coverage(profiles, found)
    better = suggest(possible, count or max(1, len(profiles)))
    then = coverage(better, found)
    if as_json:
        print_json(
            {
                "now": now.model_dump(mode="json"),
                "suggested": then.model_dump(mode="json"),
                "impossible": [item.model_dump(mode="json") for item in never.values()],
            }
        )
        return
    out = console()
    print_table(out, _table("profiles of the artifact", now))
    for item in list(never.values())[:_SHOWN]:
        out.print(f"the model never takes {item.shapes} ({item.requests} requests): {item.reason}", markup=False)
    unserved = {item.shapes for item in never.values()}
    for shapes, number in [row for row in now.uncovered if row[0] not in unserved][:_SHOWN]:
        out.print(f"no profile allows {shapes} ({number} requests)", markup=False)
    if then.covered > now.covered or then.mean_distance < now.mean_distance:
        print_table(out, _table("profiles that would fit better", then))
        out.print(" ".join(f'--profile "{profile}"' for profile in better), markup=False, soft_wrap=True)
    else:
        out.print("no other profiles of that number fit these requests better")


def _table(title: str, found: Coverage) -> Table:

    caption = (
        f"{100 * found.covered:.1f} % of {found.requests} requests covered, distance {found.mean_distance:.2f}\n"
        "(sum of |log2(dimension / optimum)|, 1: twice or half the optimum)"
    )
    figures = ("requests", "share", "distance")
    table = new_table(title, ("profile", "text"), *((name, "figure") for name in figures), caption=caption)
    for use in found.uses:
        add_row(table, use.profile, str(use.requests), f"{100 * use.share:.1f} %", f"{use.mean_distance:.2f}")
    return table
