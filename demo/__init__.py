"""The whole way on a real model: dry run, convert, two ranks, compare, merge. `make demo` runs it."""
