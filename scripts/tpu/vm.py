"""Runs specjax on Cloud TPU VMs through gcloud: create, install, run, logs, delete.

  python scripts/tpu/vm.py create  --name=spec --zone=us-central2-b --slice=v4-8
  python scripts/tpu/vm.py install --name=spec --zone=us-central2-b
  python scripts/tpu/vm.py run     --name=spec --zone=us-central2-b -- \
      --run_mode=infer --gin_file=configs/runs/infer.gin --gin.INFER_OUTPUT_DIR="'gs://mine/out'" ...
  python scripts/tpu/vm.py logs    --name=spec --zone=us-central2-b
  python scripts/tpu/vm.py delete  --name=spec --zone=us-central2-b

Every command works on all workers of a slice. --dry_run prints what would be done and does nothing.
`run` starts the job in the background of every worker and returns; `logs` shows how far it is.
"""

import argparse
import pathlib
import shlex
import subprocess
import sys
from collections.abc import Callable

from specjax.partitioning import chips

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Runtime images, as Cloud TPU's documentation names them.
IMAGES = {
    "v4": "tpu-ubuntu2204-base",
    "v5e": "v2-alpha-tpuv5-lite",
    "v5p": "v2-alpha-tpuv5",
    "v6e": "v2-alpha-tpuv6e",
}
# What gcloud calls the slices.
TYPES = {"v5e": "v5litepod"}
LOG = "specjax.log"
Command = list[str]


def gcloud(args: argparse.Namespace, *words: str) -> Command:
    """A command on TPU VMs of a zone, of a project if one is given."""
    project = [f"--project={args.project}"] if args.project else []
    return ["gcloud", "compute", "tpus", "tpu-vm", *words, f"--zone={args.zone}", *project]


def ssh(args: argparse.Namespace, command: str, worker: str = "all") -> Command:
    return gcloud(args, "ssh", args.name, f"--worker={worker}", f"--command={command}")


def create(args: argparse.Namespace) -> list[Command]:
    """The VM of a slice."""
    found = chips.parse(args.slice)
    kind = found.chip.name
    accelerator = f"{TYPES.get(kind, kind)}-{found.name.partition('-')[2]}"
    image = args.image or IMAGES[kind]
    spot = ["--spot"] if args.spot else []
    return [
        gcloud(
            args, "create", args.name, f"--accelerator-type={accelerator}", f"--version={image}", *spot
        )
    ]  # fmt: skip


def install(args: argparse.Namespace) -> list[Command]:
    """This checkout (what git tracks) and its dependencies on every worker."""
    archive = pathlib.Path("runs/tpu/specjax.tar.gz")
    unpack = (
        "mkdir -p specjax && tar xzf specjax.tar.gz -C specjax && cd specjax && "
        # the images' own Python is 3.10
        "python3 -m pip install -q --user uv && export PATH=$HOME/.local/bin:$PATH && "
        "uv venv -q --allow-existing --python 3.11 .venv && "
        "uv pip install -q -p .venv -c constraints.txt -e '.[tpu]'"
    )
    return [
        ["mkdir", "-p", str(archive.parent)],
        ["git", "archive", "--format=tar.gz", f"--output={archive}", "HEAD"],
        gcloud(args, "scp", str(archive), f"{args.name}:", "--worker=all"),
        ssh(args, unpack),
    ]


def run(args: argparse.Namespace) -> list[Command]:
    """One program over all workers; what follows ``--`` goes to ``specjax.main``."""
    if not args.arguments:
        raise ValueError("say what to run after --, e.g. -- --run_mode=infer --gin_file=...")
    text = " ".join(args.arguments).replace("=", " ")
    alone = "--run_mode bench" in text  # it measures one chip
    words = shlex.join(args.arguments if alone else ["--multihost", *args.arguments])
    # In braces, or the shell that waits for the job would hold the connection open.
    command = (
        f"cd specjax && {{ nohup .venv/bin/python -m specjax.main {words} > ~/{LOG} 2>&1 "
        "< /dev/null & } ; sleep 1"
    )
    return [ssh(args, command)]


def logs(args: argparse.Namespace) -> list[Command]:
    """The end of one worker's log (the first one prints)."""
    follow = "-f " if args.follow else ""
    return [ssh(args, f"tail -n {args.lines} {follow}~/{LOG}", str(args.worker))]


def delete(args: argparse.Namespace) -> list[Command]:
    """The VM, with all that is on it."""
    return [gcloud(args, "delete", args.name, "--quiet")]


ACTIONS: dict[str, Callable[[argparse.Namespace], list[Command]]] = {
    "create": create,
    "install": install,
    "run": run,
    "logs": logs,
    "delete": delete,
}


def parse(argv: list[str]) -> argparse.Namespace:
    """Reads the command line; what stands behind ``--`` is left as it is."""
    split = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    actions = parser.add_subparsers(dest="action", required=True)
    for name, function in ACTIONS.items():
        one = actions.add_parser(name, help=function.__doc__.splitlines()[0])
        one.add_argument("--name", required=True, help="of the TPU VM")
        one.add_argument("--zone", required=True)
        one.add_argument("--project", help="gcloud's own by default")
        one.add_argument("--dry_run", action="store_true", help="print the commands, run none")
        if name == "create":
            one.add_argument("--slice", required=True, help="v4-8, v5e-8, v5p-8, v6e-8, ...")
            one.add_argument("--image", help="the documented runtime image by default")
            one.add_argument("--spot", action="store_true", help="cheaper, may be taken away")
        if name == "logs":
            one.add_argument("--worker", type=int, default=0)
            one.add_argument("--lines", type=int, default=40)
            one.add_argument("--follow", action="store_true")
    args = parser.parse_args(argv[:split])
    args.arguments = argv[split + 1 :]
    return args


def main(argv: list[str]) -> int:
    """Prints each command, and runs it unless told not to; stops at the first that fails."""
    args = parse(argv)
    try:
        commands = ACTIONS[args.action](args)
    except ValueError as error:
        print(f"vm: {error}", file=sys.stderr)
        return 2
    for command in commands:
        print("+", shlex.join(command), flush=True)
        if args.dry_run:
            continue
        try:
            code = subprocess.run(command, cwd=ROOT, check=False).returncode
        except FileNotFoundError:
            print(f"vm: {command[0]} is not installed", file=sys.stderr)
            return 2
        if code:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
