"""Stand-in for the export: each file holds its format's name, beside a report of its check."""

from podscale.runs import RunDirectory
from podscale.util.files import file_sha256, write_json


def export_run(config, shard_set):
    run = RunDirectory.for_config(config)
    run.exports.mkdir(exist_ok=True)
    weights = file_sha256(run.model / "model.safetensors")
    for name, file in zip(config.export.formats, config.export.file_names, strict=True):
        path = run.exports / file
        path.write_text(f"<html><body>{name}</body></html>")
        check = {"run": config.run.id, "model": config.model.name, "weights_sha256": weights, "input": "", "output": ""}
        check |= {"sha256": file_sha256(path), "opset": None, "quantization": "none"}
        write_json(path.with_name(f"{file}.json"), check)
        yield f"{path}: {name}"
