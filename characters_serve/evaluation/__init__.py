"""Whether a change to the engine made the character worse: lip-sync of many clips, compared."""
