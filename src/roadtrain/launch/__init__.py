"""From plan to run: what a plan and a job start on which hosts, and what keeps it running."""
