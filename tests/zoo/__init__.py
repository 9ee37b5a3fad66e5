"""The zoo: `"auto"` on a tiny random model of every causal-LM architecture of transformers; `make zoo`."""
