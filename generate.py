"""Generate text from a trained model: `python generate.py --help`."""

from minitransformer.cli import generate

if __name__ == "__main__":
    generate()
