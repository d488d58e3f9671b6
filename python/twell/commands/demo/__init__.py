"""`twell demo`: train a small model, run its layers sparse and dense, and compare."""
