"""Whether a change to the engine made the character worse: lip-sync of many clips, compared."""

import characters_serve.engine  # noqa: F401  (its thread policy must be set before torch loads)
