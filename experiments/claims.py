"""Every table and plot of experiments/results, and the list of the paper's claims with what was measured, from the logs.

    python experiments/claims.py        seconds; needs matplotlib for the plots
"""

import contextlib
import io

import depth
import dial
import isoflop
import overheads
import recipe
from series import NOT_YET, finished_logs, guarded, jobs_at, parse_args, read_log, table

SERIES = {"recipe": recipe, "depth": depth, "isoflop": isoflop, "dial": dial}


def draw_all(args):
    rows = []
    with contextlib.redirect_stdout(io.StringIO()):         # of the other tables, each of which its own script prints
        for experiment, module in SERIES.items():
            logs = finished_logs(experiment, jobs_at(args.scale, module.jobs), args)
            module.draw(logs, args)
            rows += module.claims(logs, args.scale)
        overheads.draw(log := read_log(overheads.log_path(args)), args)
    rows += overheads.claims(log) if log else []
    rows = [row for row in rows if row[-1] != NOT_YET]
    print(table(args.results / "claims.md", ["claim", "paper", "measured", "verdict"], rows))


def main(argv=None):
    guarded("claims", draw_all, parse_args(__doc__.splitlines()[0], argv, runs=False))


if __name__ == "__main__":
    main()
