"""The commands of the command line, one a file.

Each file `NAME.py` has one public function, called as the file, whose signature is the command line: its
parameters (keyword-only, with types and defaults) are the options, its Google docstring the help. It

* imports nothing heavy when it is imported: torch, numpy and the rest of linnet are imported inside, so that
  `linnet --help` answers at once;
* prints a short summary for people on standard output; progress goes to standard error;
* returns a dictionary of plain values, which `--json` prints instead of the summary. `"ok": False` in it
  makes the command end with status 1;
* raises a `linnet.errors.LinnetError` for anything that the user can put right;
* calls the folder it writes `out`: `linnet.app.cli` puts a replayable `run.yaml` there. With an `overwrite`
  beside it no other process writes there, and no run of other settings lies there, while the command runs;
* calls a network that it builds `model` and `model_args`: `linnet.app.cli` refuses code that only a
  settings file names;
* hands `trust`, a flag of the command line alone, on to what opens a run.
"""
