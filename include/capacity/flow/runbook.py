"""The DAGs' documentation, shown in the UI: what they do, and what to do when they fail."""

COMMON = """
### What the tasks do
| task | what it does |
|---|---|
| `plan` | checks the fleet file and the run's parameters, lists the steps |
| `lease` | waits until the accelerator is free and holds it for this run |
| `start_server` | starts the model server; done when it answers a real completion |
| `ladder` | one task per class and concurrency, upwards; steps past the cliff are skipped |
| `refine` | bisects between the last step that held and the first that did not |
| `prove` | proves the candidate on fresh requests, going down until one holds |
| `shared` | proves a pair of limits with both classes at once, where the fleet asks for it |
| `anchor` | measures the lowest step again: did the server change during the sweep? |
| `stop_server` | stops the server, whatever happened, and gives the accelerator back |
| `validate` `limits` `report` | judge the data, compute the limits, write the report |
| `fleet_report` `publish` | the report over all models; everything to the object store |
| `check_run` | makes the run's colour true |

### What the colour means
**Green**: every selected model was measured. Refusals, a cliff, even a crash at some concurrency are results,
not failures. **Red**: something of *ours* failed: a server could not be served, a measurement cannot be trusted
and a class has no limit because of it, or nothing could be published. What was proven is published all the same.

### When it is red
| failed task | look at | then |
|---|---|---|
| `plan` | its log names the file, key and value that are wrong | mend the fleet file or the parameters, trigger again |
| `lease` | its log names the run that holds the accelerator | wait, or end that run; stale leases are broken by themselves |
| `start_server` | its log ends with the tail of the server's own log, or says that others use the accelerator or the endpoint | mend the model's arguments, or come back when it is free; clear the task |
| `ladder` ... `anchor` | the step's log: a client error (400, 401, 404) means the requests are wrong; "kill switch" means that somebody wanted the load to end | clear the step; the server comes back for it |
| `validate` ... `report` | the quality section of the report: what was rejected and why | follow its advice, clear the failed task |
| `publish` | its log names the bucket and object | mend the connection or the bucket, clear the task: nothing is measured again |
| `check_run` only | its log says which class has no limit, and why | follow its advice, trigger again |

Clearing a step measures it again and nothing else; results of other steps are kept. Clearing the whole run goes on
with it: what it has measured is kept, the rest is measured; if the fleet file or the server's stack have changed by
then, that is refused, and a new run must be triggered.
"""

NIGHTLY = (
    """
Finds out, for each model of the fleet file, how many requests may be in flight per service class before answers
stop completing within their deadline or the first token comes too late; publishes the limits with their evidence.

**Enable it** with the switch beside its name. A run that starts later than the fleet's `max_lateness_s` is
skipped, so enabling it at noon does not start the accelerators at once. To measure now, use the Trigger button or
the DAG `capacity_sweep`.
"""
    + COMMON
)

SWEEP = (
    """
Sweeps the models you choose, with your own concurrency steps and objectives. **Trigger** opens the form; a blank
field means "as the fleet file says". Wrong values are refused before any server starts. Results go to the same
store as the nightly's, under this run's id; `latest/` moves only with *Promote*.
"""
    + COMMON
)

IMPORT = """
Judges result files of other tools: may they be used, and what do they show? **Trigger** asks for a path, a result
file or a folder of them. Formats and versions are told by content. The report goes to the same store as the
nightly's, under this run's id; `latest/` is never moved.

### What the tasks do
| task | what it does |
|---|---|
| `read` | reads the files (from the worker's disk or the object store) as one table of steps, in seconds |
| `validate` | judges the steps by every check that their columns allow; what cannot be checked is listed |
| `limits` | peaks, ranges and knees per curve, and what set a plateau |
| `report` | the report with its figures |
| `publish` | everything to the object store |

### What the colour means
**Green**: the files were read and judged. "Rejected" is a judgement, so it is green too: the report says which steps
cannot be trusted, and why. **Red**: a file could not be read, or nothing could be published.

### When it is red
| failed task | look at | then |
|---|---|---|
| `read` | its log names the path that holds nothing, or the file that no format knows and what was expected | trigger again with another path, or leave the file out of the folder |
| `validate` ... `report` | its log names the step and column | mend the file, trigger again |
| `publish` | its log names the bucket and object | mend the connection or the bucket, clear the task |
"""

REAPER = """
Clears away what runs have left behind, on the machine of its worker: a model server whose run has ended or was
deleted (its task was killed, the run marked failed in the middle of a start), and leases on accelerators whose holder
is gone. It runs every quarter of an hour. A server whose run goes on, a process that only has the number of one of
ours, and servers on other machines are never touched. **Trigger** with *Dry run* to read in the log what it would do.

### What the tasks do
| task | what it does |
|---|---|
| `reap` | asks Airflow which runs are over; stops their servers, breaks their leases, one log line each |

### What the colour means
**Green**: nothing is left that should not be, whether or not there was something to clear away. **Red**: a server could
not be stopped, or nobody could be asked (Airflow, the container engine, the cluster).

### When it is red
| failed task | look at | then |
|---|---|---|
| `reap` | its log names the server, its process and why it lives on | end it by hand; the next run sees that it is gone |

Without Airflow: `python -m include.capacity reap --dry-run`.
"""
