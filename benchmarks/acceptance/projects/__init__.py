"""One file for each public project, with a `PROJECT` of benchmarks.acceptance.project.Project in it."""
