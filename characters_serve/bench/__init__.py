"""Measurements that name their command, commit and machine."""

import characters_serve.engine  # noqa: F401  (its thread policy must be set before torch loads)
