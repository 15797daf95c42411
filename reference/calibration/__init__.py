"""What this machine does with the operators of a model, the optimizer and the hooks of an engine, each timed alone."""


def check_cuda() -> None:
    """Whether there is a GPU to be measured.

    Raises:
        InputError: there is none.

    """
    import torch  # noqa: PLC0415  the package is imported by what starts processes, and needs no torch itself

    from zsim.units import InputError  # noqa: PLC0415

    if not torch.cuda.is_available():
        raise InputError(
            "--device cuda: torch sees no GPU on this machine; allowed: an experiment of CPUs, such as lab_zero3.yaml"
        )
