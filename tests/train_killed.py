"""The training program, killed: rank 1 dies in the middle of its second checkpoint, half of its file written."""

import os
import signal

from torch.distributed.checkpoint.filesystem import FileSystemWriter

from reference import train

FATAL_SAVE = 2


class Killed:
    """Counts saves in place of `FileSystemWriter.write_data`."""

    def __init__(self):
        self.original = FileSystemWriter.write_data
        self.num_saves = 0

    def __get__(self, writer, _kind):
        return lambda plan, planner: self.write(writer, plan, planner)

    def write(self, writer, plan, planner):
        """Writes, and at the fatal save tears the file and the process apart."""
        self.num_saves += 1
        written = self.original(writer, plan, planner)
        if self.num_saves == FATAL_SAVE and os.environ["RANK"] == "1":
            written.wait()
            (path,) = writer.path.glob("__1_*")
            os.truncate(path, path.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        return written


if __name__ == "__main__":
    FileSystemWriter.write_data = Killed()
    train.main()
