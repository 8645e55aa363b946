"""Reinforcement learning of language models as agents: vLLM rollouts across Ray actors, TRL-style trainers."""

import os

__version__ = "0.1.0"

# Both are read when torch is loaded, so this comes before any import of it; what the user has set stays.
# OpenMP threads that wait sleep soon: beside one other busy process, spinning ones make a step 10 to 30 times slower.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
# oneDNN compiles a kernel for every shape and keeps 1,024: with lengths that always differ a process grows for hours.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")
