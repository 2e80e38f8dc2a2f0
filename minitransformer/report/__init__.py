"""A run in one HTML file that asks for nothing else; several runs side by side."""
