"""The command `python -m minitransformer.evaluate`: how well a trained model predicts a text."""

if __name__ == "__main__":
    from minitransformer import cli

    cli.evaluate()
