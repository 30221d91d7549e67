"""`quantize verify`: is the artifact as it was written?"""

from __future__ import annotations

from pathlib import Path

import click

from pipeline.cli.common import output_options, print_json, user_errors


@click.command()
@click.argument("artifact", type=click.Path(path_type=Path))
@output_options
@user_errors
def command(artifact: Path, as_json: bool, quiet: bool, verbose: bool) -> None:
    """Re-hash every file of ARTIFACT and compare with its manifest; exit code 1 names each file that differs."""
    from pipeline.artifact import Artifact
    from pipeline.core.errors import CheckFailed

    opened = Artifact.open(artifact)
    differences = opened.differences()
    if as_json:
        print_json(
            {
                "artifact": str(artifact),
                "files": len(opened.manifest.files),
                "differences": [d.model_dump() for d in differences],
            }
        )
    if differences:
        if as_json:
            raise SystemExit(CheckFailed.exit_code)
        raise CheckFailed(
            f"{artifact} differs from its manifest:\n" + "\n".join(f"  {difference}" for difference in differences),
            remedy="restore the files, or run `quantize build` again",
        )
    if not as_json and not quiet:
        click.echo(f"{artifact}: all {len(opened.manifest.files)} files are as written")
