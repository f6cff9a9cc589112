"""Sizes and budgets from a configuration alone: no torch, no weights, no accelerator."""
