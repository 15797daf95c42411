"""`python -m reference.launching.agent TORCHRUN-ARGUMENTS`: torchrun's agent of a node; writes down what failed."""

import json
import os
import sys
from pathlib import Path
from typing import Any

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from reference.launching import heartbeat, processes, wire
from zsim.errors import EXIT_OWN_CHECK


def main() -> int:
    """Runs torchrun; exit code 1 where a rank or the agent itself has failed."""
    processes.end_with(int(os.environ[processes.PARENT_VARIABLE]))
    try:
        run.main(sys.argv[1:])
    except ChildFailedError as error:
        ranks = [{"rank": rank, "exit_code": failure.exitcode} for rank, failure in error.failures.items()]
        return _report(ranks=ranks, error="")
    except Exception as error:  # noqa: BLE001  whatever it is, the launcher names it
        return _report(ranks=[], error=f"{type(error).__name__}: {error}")
    return 0


def _report(**what: Any) -> int:
    path = Path(os.environ[heartbeat.FOLDER_VARIABLE]) / f"node_{os.environ[wire.NODE_VARIABLE]}.json"
    path.write_text(json.dumps(what), encoding="utf-8")
    return EXIT_OWN_CHECK


if __name__ == "__main__":
    sys.exit(main())
