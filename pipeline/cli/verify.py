"""`quantize verify`: is the artifact as it was written, and does its engine compute what was recorded?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.cli.common import JsonCommand, make_progress, output_options, print_json, user_errors
from pipeline.cli.idle import refuse_idle

if TYPE_CHECKING:
    from pipeline.consistency.device import DeviceCheck


@click.command(cls=JsonCommand)
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option("--on-device", is_flag=True, help="Also run the engine here on the recorded samples.")
@click.option("--target", default="tensorrt", show_default=True, help="For --on-device.")
@output_options
@user_errors
def command(artifact: Path, on_device: bool, target: str, as_json: bool, quiet: bool, verbose: bool) -> None:
    """Re-hash every file of ARTIFACT and compare with its manifest; exit code 1 names each file that differs.

    With --on-device, what a serving machine runs at start-up: the engine's outputs on the artifact's sample inputs are
    compared with those recorded there.
    """
    from pipeline.artifact import Artifact
    from pipeline.core.errors import CheckFailed, QuantizeError

    if not on_device:
        refuse_idle(("target",), "the check of an engine", "give --on-device as well")
    opened = Artifact.open(artifact)
    differences = opened.differences()
    summary: dict[str, Any] = {
        "artifact": str(artifact),
        "files": len(opened.manifest.files),
        "differences": [difference.model_dump() for difference in differences],
    }
    if differences:
        raise CheckFailed(
            f"{artifact} differs from its manifest:\n" + "\n".join(f"  {difference}" for difference in differences),
            remedy=f"`quantize errors {artifact}` puts its report in place"
            if all(difference.kind == "unplaced" for difference in differences)
            else "restore the files, or run `quantize build` again",
            figures=summary,
        )
    device: DeviceCheck | None = None
    if on_device:
        from pipeline.consistency.device import check_on_device

        try:
            device = check_on_device(artifact, target=target, progress=make_progress(quiet=quiet))
        except QuantizeError as error:
            error.figures = {**summary, **error.figures}
            raise
        summary["device"] = device.model_dump(mode="json")
        if wrong := [output for output in device.outputs if not output.passed]:
            raise CheckFailed(
                f"the {target} engine does not compute what was recorded: "
                + ", ".join(f"{o.output} differs by {o.relative_l2:.3g}, allowed is {o.allowed:.3g}" for o in wrong),
                remedy=f"build it again on this machine: quantize build --from {artifact} --target {target}",
                figures=summary,
            )
        if not device.passed:
            raise CheckFailed(
                f"the {target} engine does not have the artifact's scales: {len(device.wrong)} tensors differ",
                remedy=f"`quantize consistency {artifact} --on-device` lists them",
                figures=summary,
            )
    if as_json:
        print_json(summary)
    elif not quiet:
        click.echo(f"{artifact}: all {len(opened.manifest.files)} files are as written")
        for output in device.outputs if device is not None else ():
            click.echo(f"{target} engine, output {output.output}: relative L2 {output.relative_l2:.3g} to the recorded")
