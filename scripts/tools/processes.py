"Commands that the tools run."

import os
import subprocess
import sys


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


def of_package(folder, *words, **how):
    """Lines that a process of Python prints which takes the package of a folder, or the
    installed one where the folder has none. Raises SystemExit if it fails."""
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"PYTHONPATH": path}
    command = [sys.executable, *words]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, **how)
    if done.returncode:
        raise SystemExit(f"the package in {folder} ended with {done.returncode}")
    return done.stdout.splitlines()
