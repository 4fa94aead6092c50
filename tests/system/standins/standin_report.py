"""A report of one line."""


def build_report(run_directory, shard_set):
    path = run_directory / "report.html"
    path.write_text("<html><body>report</body></html>")
    return path
