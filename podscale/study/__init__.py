"""Studies: grids of small runs that answer a question about training, usually about the batch size."""

from podscale.study.document import StudyDocument, read_study

__all__ = ["StudyDocument", "read_study"]
