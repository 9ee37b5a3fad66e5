"""What autotp costs, measured. `make bench` runs them all."""
