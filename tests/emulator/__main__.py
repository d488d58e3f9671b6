"""Random checks of compiled kernels on the emulator, for some time; see docs/develop.md.

    python -m tests.emulator --seconds 600
    python -m tests.emulator --seed 1 --first 37 --seconds 0    # one case again

Exit status: 1 if a check failed, 2 if the emulator cannot run here.
"""

import argparse
import random
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch

from tests.cases.judged import Mismatch
from tests.emulator import cases, checks, launch


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60, help="after which no case begins (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of all cases (%(default)s)")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="number of the first case (%(default)s)")
    arguments = parser.parse_args()
    reason = launch.missing()
    if reason is not None:
        print(reason, file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    number, failed, end = arguments.first, 0, time.monotonic() + arguments.seconds
    with tempfile.TemporaryDirectory() as folder:
        emulator = launch.Emulator(Path(folder))
        while number == arguments.first or time.monotonic() < end:
            generator = random.Random(f"{arguments.seed}:{number}")
            schedule = launch.Schedule.of(generator.randrange(1 << 20))
            check: partial[object] = checks.draw(generator)
            if generator.random() < 0.2:
                check = partial(cases.run, emulator, cases.draw(generator))
            try:
                with emulator.stands_in(2 * generator.randint(1, 4), schedule):
                    check()
            except (AssertionError, Mismatch, launch.EmulatorError) as error:
                failed += 1
                print(f"case {number}: {check.func.__name__}{check.args}, {schedule}: {error}", flush=True)
            number += 1
        emulator.close()
    print(f"{number - arguments.first} cases with seed {arguments.seed} from {arguments.first} on, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
