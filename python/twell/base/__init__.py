"""What all packages above share and what knows no layer: arguments, files, memory, words, activations."""
