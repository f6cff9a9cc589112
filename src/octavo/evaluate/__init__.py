"""How good a model's answers are: perplexity on a text."""
