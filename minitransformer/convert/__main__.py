"""Convert a model: `python -m minitransformer.convert --help`."""

if __name__ == "__main__":
    from minitransformer import cli

    cli.convert()
