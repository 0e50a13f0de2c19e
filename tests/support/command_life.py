"""When the commands of the documents are typed in a run's life, what as, and what comes of it."""

from enum import IntEnum

from documents_reader import RUN, SECOND


class Phase(IntEnum):
    """When a command is typed; each phase has a terminal of its own."""

    FREE = 0
    """It needs no run: typed while one starts."""
    LIVE = 1
    FINISHED = 2
    LONGER = 3
    """As before, in time for a second run to get ready."""
    STOP = 4
    """The second run goes on."""
    AFTER = 5
    """Nothing else computes."""
    AGAIN = 6
    """The finished run is taken up once more."""
    ELSEWHERE = 7
    """With a Temporal server of the reader's own, and workers that are started by hand."""
    LAST = 8


STEPS: dict[Phase, tuple[str, ...]] = {
    Phase.LIVE: (
        *("perdure pause .*", "perdure doctor engine .*", "perdure checkpoint .*"),
        "perdure resume .*",
    ),
    # The run is joined and followed to its end, then the next one starts.
    Phase.FINISHED: (
        *("scripts/quickstart", "perdure start .*"),
        r"perdure (status|audit|report|wait|up)\b.*|perdure (validate|plan) mine.toml",
    ),
    Phase.LONGER: ("(perdure (analyze|schedule|evaluation list)|temporal schedule) .*",),
    Phase.STOP: ("perdure stop .*",),
    Phase.AFTER: (
        *("python export-hf.py", "cd .*sha256sum", "scripts/quickstart --tiny"),
        *("perdure run configs/.*", "perdure doctor .*"),
    ),
    Phase.AGAIN: (
        *("perdure fork .*", "perdure run runs/.*", "perdure rewind .*"),
        "perdure cancel .*",
    ),
    Phase.ELSEWHERE: (
        *("export (TEMPORAL|RAY|PERDURE_DEPLOYMENT).*", ".*perdure worker .*"),
        *("temporal worker deployment .*", "perdure config render .*", "temporal workflow .*"),
        *("perdure run mine.*", "TEMPORAL_ADDRESS=.*", "python -m .*"),
    ),
    Phase.LAST: (
        *("python -c .*", "chmod .*", "perdure evaluation resubmit .*"),
        *("export PERDURE_PAYLOAD.*", "perdure down", "perdure codec-server .*"),
    ),
}
"""Patterns of commands in the order in which they are typed; every other command is free."""

PLACEHOLDERS = {
    r"\bNAME\b": RUN,
    r"\bFILE\b": f"configs/recipes/{RUN}.toml",
    r"\bROOT\b": f"runs/{RUN}",
    r"--at UPDATES --to runs/\S+$": "--at 8 --to runs/warmer --set optimizer.learning_rate=4e-5",
    r"--to UPDATES$": '--to 8 --reason "reward fell after update 10"',
    r"(?<=services )URL --output OUTPUT": "http://127.0.0.1:1234 --output runs/services.json",
    r"(?<=gpu-usage )OUTPUT": f"runs/{RUN}/checkpoints/gpu_usage_node0.jsonl",
    r"(?<=^cd )runs/weekly/.*(?=/export-hf )": f"runs/{RUN}",
    "s3://prompts/": "prompts/",
    rf"(?<=^perdure stop ){RUN}\b": SECOND,
    # shorter, or at a port that is free
    r"(?<=learning_rate=4e-5)$": " --set training.num_rollouts=9",
    r"(?<=data.seed=18)$": " --set training.num_rollouts=3 --set model.tiny.warmup_accuracy=0",
    r"(?<=^perdure model tiny --out models/tiny)$": " --warmup-accuracy 0",
    r"(?<=^perdure codec-server)$": " --port 0",
    r"(?<=^python -m workers.alive)$": " temporal.example:7233",
}
"""What stands for something in a command, and what is typed instead."""

SAYS = {
    f"perdure status {RUN} --verify": "train/quickstart: complete, 13 checks hold",
    f"perdure audit runs/{RUN}": "none missing, none doubled",
}
"""What the first run says that these print."""

GO_ON = {
    "perdure worker control": "task_queue=perdure-control",
    "perdure worker gpu": "task_queue=perdure-fleet-local",
    r"RAY_ADDRESS=\S+ PERDURE_FLEET=big perdure worker gpu": "task_queue=perdure-fleet-big",
    "perdure codec-server .*": r"endpoint (?P<url>\S+) --codec-auth 'Bearer (?P<token>\w+)'",
}
"""What goes on until Ctrl-C, and what it prints once it serves."""

REFUSED = {
    "perdure doctor gpu.*": (1, "not fit: GPU"),
    "perdure gpu-usage .*": (2, "no NVIDIA driver|nvidia-ml-py"),
    r"scripts/gpu_scale.sh \d.*": (2, "GPUs are asked for, 0 are there"),
}
"""Exit code, and a pattern of the answer, of what is refused where no GPU is."""

NOT_YET = {
    "temporal worker deployment set-current-version .*": "not found|no workers|No Worker ",
}
"""Of a command that is typed again: what it answers until workers have told the server of them."""
