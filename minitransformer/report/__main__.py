"""python -m minitransformer.report RUN..."""

from minitransformer import cli

if __name__ == "__main__":
    cli.report()
