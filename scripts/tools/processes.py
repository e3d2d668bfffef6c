"Commands that the tools run."

import os
import subprocess


def ended(command, seconds, **how):
    """(exit status, what it printed) of a command and what it started; the status is None if it
    takes longer than so many seconds, and everything is ended then."""
    with subprocess.Popen(
        [*map(str, command)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
        **how,
    ) as process:
        try:
            said = process.communicate(timeout=seconds)[0]
            return process.returncode, said
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            return None, process.communicate()[0]
