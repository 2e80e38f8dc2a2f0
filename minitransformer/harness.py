"""The command `python -m minitransformer.harness`: EleutherAI's lm_eval for models of this package."""

if __name__ == "__main__":
    from minitransformer import cli

    cli.harness()
