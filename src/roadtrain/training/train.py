"""train(): the training loop of a job, for a model that place() has placed (`PlacedJob`) or that
parallelize() has split into stages (`StagedJob`).

Batches, learning rates and dropout are functions of the step's number, so a resumed run repeats
them. The line of a step is in metrics.jsonl before the step can be committed.
"""

from __future__ import annotations

import time

from roadtrain.config.job import Job
from roadtrain.options.schema import as_tree
from roadtrain.retry import undone_on_error
from roadtrain.storage.direct import make_directory
from roadtrain.training.memory_limit import limited
from roadtrain.training.metrics import Metrics
from roadtrain.training.placed_job import PlacedJob, open_placed
from roadtrain.training.progress import Report, progress, show_table
from roadtrain.training.run_files import lines_of, write_job
from roadtrain.training.run_lines import RunLines
from roadtrain.training.staged_job import StagedJob, open_staged
from roadtrain.training.stop import INTERRUPTED, Stop
from roadtrain.training.summary import Summary
from roadtrain.training.timeline import Timeline, timeline_of
from roadtrain.training.trackers import Trackers, check_installed


def train(job: Job, report: Report = print, program: str = "roadtrain") -> Summary:
    """Train `job` from its last committed step to run.steps, and show a table of results.

    `program`: the command that starts roadtrain, as shown in the table. Raises RoadtrainError.
    """
    opened = open_staged if job.parallelism.used else open_placed
    check_installed(job.run.report_to)
    with limited(job.limit_nbytes):
        stop = Stop(job.run.minutes)  # run.minutes begin now
        make_directory(job.run_dir)
        with (
            opened(job, report) as run,
            stop.on_signals(run.report),
            Trackers(job.run.report_to, job.run_dir, as_tree(job), run.report) as trackers,
        ):
            if job.data.held_out:  # refuse before training
                run.tokens.held_out_rows(job.data.batch_size, job.data.seq_len)
            if run.steps_done >= job.run.steps:
                run.report(f"step {run.steps_done} of {job.run.steps}: no step is left to train")
            why, trained = train_steps(run, stop, trackers)
            run.finish(why)
            trackers.follow(lines_of(job), run.steps_done)
            held_out = None if INTERRUPTED in why else run.held_out_loss()
            summary = Summary(run.steps_done, *trained.first_and_last(), held_out, why)
            show_table(run.rows(summary, trained, program), run.report)
            return summary


def train_steps(run: PlacedJob | StagedJob, stop: Stop, trackers: Trackers) -> tuple[str, RunLines]:
    """Train the remaining steps.

    Returns the reason why training ended before run.steps (else ""), and the lines of these steps.
    """
    job, lines, done, trained = run.job, lines_of(run.job, run.rank), run.steps_done, RunLines()
    with (
        Metrics(lines, done, fresh=run.is_stale(lines)) as metrics,
        Timeline(timeline_of(lines), run.report) as timeline,
    ):
        if run.rank == 0:
            write_job(job)  # now that all checks have passed
        if metrics.note:
            run.report(metrics.note)
        run.begin()
        if done:
            trackers.follow(lines, done)  # steps that an earlier start has not logged
        with progress(job, done, run.report) as show:
            then = time.perf_counter()
            while run.steps_done < job.run.steps:
                if why := run.why(stop):
                    return why, trained
                record = run.step(stop)
                now = time.perf_counter()
                line = record.line(job, run.steps_done, now - then)
                then = now
                with undone_on_error(run.abandon):  # never commit a step without its line
                    metrics.append(line)
                show(line)
                timeline.add(run.steps_done, run.intervals())
                trained.add(line)
                trackers.follow(lines, line["committed"])
                run.keep()
    return "", trained
