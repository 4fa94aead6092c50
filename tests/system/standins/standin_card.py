"""Stand-in for the model card: one line."""


def write_model_card(run_directory, shard_set):
    path = run_directory / "model" / "README.md"
    path.write_text("# model\n")
    return path
