"""`ecinn models`: what ships."""

from typing import Any

from rich.table import Table

from ecinn.checkpoints import SHIPPED, load_checkpoint, shipped_models
from ecinn.cli.app import Json, app, out, print_json


@app.command("models")
def list_models(json_output: Json = False) -> None:
    """List the models that come with the package."""
    rows = []
    for name in shipped_models():
        checkpoint = load_checkpoint(name)
        size = (SHIPPED / f"{name}.safetensors").stat().st_size
        rows.append(
            {
                "name": name,
                "data": checkpoint.experiment.dataset,
                "classes": list(checkpoint.class_names),
                "bytes": size,
                "beta": checkpoint.experiment.beta,
                "metrics": dict(checkpoint.metrics),
            }
        )
    if json_output:
        print_json(rows)
        return
    table = Table("model", "data", "classes", "error", "bits/dim", "reached q", "size", box=None)
    for row in rows:
        metrics: Any = row["metrics"]
        table.add_row(
            f"[bold]{row['name']}[/]",
            str(row["data"]),
            str(len(row["classes"])),  # type: ignore[arg-type]
            f"{100 * metrics['error']:.2f} %" if metrics else "–",
            f"{metrics['bits_per_dim']:.2f}" if metrics else "–",
            f"{100 * metrics['reached_q']:.2f} %" if metrics else "–",
            f"{int(row['bytes']) / 2**20:.1f} MiB",  # type: ignore[call-overload]
        )
    out.print(table)
