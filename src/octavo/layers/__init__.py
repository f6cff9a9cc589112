"""Building blocks of the natively written models. Each takes a few values and its weights, never a whole configuration."""
