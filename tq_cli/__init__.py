"""The command ``tq``: what this machine can run, and what fits into its memory."""
