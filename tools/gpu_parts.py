"""What tools/one-gpu and tools/two-gpus have in common: parts with time limits, a table of measured against wanted, and a
daemon on the small pair. A part that fails is named, and the others go on."""
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
TARGET, DRAFTER = ROOT / "models/tiny-qwen3.6", ROOT / "models/tiny-qwen3.6-dflash"


# Without a folder: the one that was built last.
def find_program(name, folder):
    places = [pathlib.Path(folder) / name] if folder else sorted(
        (ROOT / "build").glob(f"[cg]pu/*/**/{name}"), key=lambda place: place.stat().st_mtime, reverse=True)
    for place in places:
        if place.is_file() and os.access(place, os.X_OK):
            return str(place)
    sys.exit(f"no program {name}; name its folder with --programs")


class Results:
    def __init__(self, path):
        self.path, self.parts, self.table = path, {}, []

    # What a machine lacks: neither good nor bad.
    def skip(self, name, why):
        self.parts[name] = dict(ok=True, skipped=why)
        print(f"-- {name}: skipped: {why}", flush=True)

    def part(self, name, ok, seconds, **more):
        self.parts[name] = dict(ok=ok, seconds=round(seconds, 1), **more)
        print(f"-- {name}: {'ok' if ok else 'FAILED'} in {seconds:.1f} s", flush=True)
        self.path.write_text(json.dumps(dict(parts=self.parts, table=self.table), indent=1))

    # One line of the final table; `wanted` is the most that is good, or None.
    def line(self, what, value, wanted=None):
        self.table.append(dict(what=what, value=value, wanted=wanted))

    def print_table(self):
        print(f"\n{'':<58} {'measured':>10} {'wanted':>8}")
        for row in self.table:
            value, wanted = row["value"], row["wanted"]
            text = "-" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
            verdict = "" if wanted is None or value is None else "" if value <= wanted else "  <- worse"
            print(f"{row['what']:<58} {text:>10} {'' if wanted is None else f'{wanted:g}':>8}{verdict}")
        skipped = [name for name, part in self.parts.items() if "skipped" in part]
        if skipped:
            print("skipped parts: " + ", ".join(skipped))
        failed = [name for name, part in self.parts.items() if not part["ok"]]
        print("failed parts: " + (", ".join(failed) if failed else "none"))
        return not failed


def finish(command, limit, environment=None):
    """Runs one program to its end: exit code (-1: it took too long) and output."""
    try:
        ran = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                             timeout=limit, text=True, errors="replace", env=environment)
        return ran.returncode, ran.stdout
    except subprocess.TimeoutExpired as late:
        return -1, (late.stdout or b"").decode(errors="replace") + f"\n(more than {limit} s)"


def run(results, name, command, limit):
    """Runs one program as a part; whether it was good."""
    begin = time.monotonic()
    code, output = finish(command, limit)
    results.part(name, code == 0, time.monotonic() - begin, output=output[-6000:])
    if code != 0:
        print(output[-1500:])
    return code == 0


def figures(path):
    """{section: {row: {figure: value}}} of a report of our benchmarks."""
    report = json.loads(path.read_text())
    sections = {}
    for table in report["tables"]:
        sections[table["title"]] = {row.pop("name"): row for row in table["rows"]}
    return sections


def section(sections, word):
    return next((rows for title, rows in sections.items() if word in title), {})


class Daemon:
    """dflashd on the small pair."""

    def __init__(self, programs, flags):
        command = [programs["dflashd"], "--model", str(TARGET), "--draft-model", str(DRAFTER), "--listen", "127.0.0.1:0",
                   "--ops-listen", "127.0.0.1:0", "--worker", programs["worker"]] + flags
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.lines, self.changed = [], threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()
        self.address = re.search(r"listening on ([0-9.:]+)", self.wait("dflashd: listening on", 30)).group(1)
        self.wait("dflashd: ready", 120)

    def _read(self):
        for line in self.process.stdout:
            with self.changed:
                self.lines.append(line)
                self.changed.notify_all()

    def wait(self, text, limit, since=0):
        end = time.monotonic() + limit
        with self.changed:
            while True:
                for line in self.lines[since:]:
                    if text in line:
                        return line
                left = end - time.monotonic()
                if left <= 0 or self.process.poll() is not None:
                    raise RuntimeError(f"no '{text}' from dflashd:\n" + "".join(self.lines[-20:]))
                self.changed.wait(min(left, 1))

    def ranks(self):
        """Process ids of the present life's ranks."""
        pids = {}
        for line in self.lines:
            found = re.search(r"epoch (\d+): started .* as process (\d+), rank (\d+)", line)
            if found:
                pids[int(found.group(3))] = int(found.group(2))
        return pids

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()


# The golden replay on a daemon that is started with `flags`: texts, and tokens per round. Near ties may fall otherwise
# on another backend: what counts is in the output, the summary in the table.
def replay(results, programs, name, flags, is_exact):
    begin = time.monotonic()
    try:
        daemon = Daemon(programs, [*flags, "--block-length", "whole"])
    except RuntimeError as error:
        results.part(name, False, time.monotonic() - begin, output=str(error))
        return
    try:
        ran = subprocess.run([programs["dflashctl"], "--address", daemon.address, "replay",
                              str(ROOT / "tests/golden/golden.json")], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                             text=True, timeout=90)
        kind = next((line.split("communicator ")[1].strip() for line in daemon.lines if "communicator " in line), "alone")
        outputs = re.search(r"(\d+/\d+) outputs identical", ran.stdout)
        chat = re.search(r"^chat +\S+ +\S+ +([0-9.]+)", ran.stdout, re.M)
        ok = outputs is not None and (ran.returncode == 0 or not is_exact)
        results.part(name, ok, time.monotonic() - begin, output=ran.stdout[-4000:], communicator=kind)
        results.line(f"{name} ({kind}): outputs identical", outputs.group(1) if outputs else None)
        results.line(f"{name} ({kind}): tokens per round, chat", chat.group(1) if chat else None)
    except subprocess.TimeoutExpired:
        results.part(name, False, time.monotonic() - begin, output="the replay took too long")
    finally:
        daemon.stop()
