"""The training state on disk: `checkpoint` saves and restores it, `saving` does so as a run goes on."""
