"""Programs that write generated files, build the site and check links; none is part of the wheel."""
