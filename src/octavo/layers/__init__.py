"""Building blocks of the models. Each takes a few values and its weights, never a whole configuration."""
