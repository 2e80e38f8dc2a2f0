"""Train a language model: `python train.py --help`."""

from minitransformer.cli import train

if __name__ == "__main__":
    train()
