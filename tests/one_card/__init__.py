"""What `benchmarks.gpu` compares on a card, and what a CPU can compare of it; `tests.studies` runs it."""
