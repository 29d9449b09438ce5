"""`python little_work.py TENSORFERRY COMMAND ARGUMENT...`: runs the command as a document writes
it, but so that it has little to do: small tensors, few of them, a short time."""

import subprocess
import sys

LITTLE = {
    "bench": {"sizes": ["64K"], "iterations": ["2"], "threads": ["1"]},
    "sweep": {"io-size": ["1M"], "engine": ["threads"], "loops": ["1"], "no-sudo": []},
    "tune": {"seconds": ["5"]},
    "verify": {"size": ["1M"], "duration": ["1"]},
}


def smaller(words):
    """The arguments with the options of LITTLE in place of those that are given."""
    command, *rest = words
    options = LITTLE.get(command, {})
    if "--check" in rest:
        return words
    kept, skipping = [], False
    for word in rest:
        if word.startswith("-"):
            skipping = word.lstrip("-").replace("_", "-") in options
        if not skipping:
            kept.append(word)
    little = [word for name, values in options.items() for word in (f"--{name}", *values)]
    if command == "sweep" and not any("sweep" in word for word in rest):
        with open("little.json", "w", encoding="ascii") as file:
            file.write('{"block_size": ["128K", "1M"]}')
        little += ["--sweep-config", "little.json"]
    return [command, *kept, *little]


if __name__ == "__main__":
    program, *arguments = sys.argv[1:]
    status = subprocess.run([program, *smaller(arguments)]).returncode
    # This machine may well need attention.
    sys.exit(0 if arguments[0] == "doctor" and status == 1 else status)
