"""The compute processes of a group: rank, decoder, and the pattern that needs no model."""

import os

# Read by OpenMP when torch is loaded, hence here, before any module of this package imports torch.
# Threads that spin between steps take the cores of the media loop beside them.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
