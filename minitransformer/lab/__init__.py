"""The attention lab: an interactive page about what a trained model does with a text."""
